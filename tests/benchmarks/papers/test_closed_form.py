"""StreamRL's formula for the number of dedicated workers."""

from __future__ import annotations

import numpy as np

from actors.policies.assigning.generation_time import Instance
from benchmarks.papers.cluster.closed_form import closed_form
from tests.actors.policies.assigning.test_dispatch_long import Pace


def test_the_papers_formula_always_dedicates_at_least_one_and_its_sum_differs_from_the_larger_of_the_two() -> None:
    lengths = np.random.default_rng(3).pareto(1.2, 1024) * 2000 + 500
    instance = Instance(Pace(), 64)
    by_sum, by_max = (closed_form(lengths, instance, 16, objective=o) for o in ("sum", "max"))
    assert 1 <= by_sum <= 15
    assert 1 <= by_max <= 15
    assert by_sum != by_max
    assert closed_form(np.full(10, 100.0), instance, 2) == 1
