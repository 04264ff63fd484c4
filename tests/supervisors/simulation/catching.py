"""Whether simulations catch a planted bug, and only because it was planted."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest

from configs.scenario import Scenario
from supervisors.simulation.runner import simulate

SEEDS_MAX = 60


def assert_caught(
    plant: Callable[[Any], None], scenario: Scenario, first_seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some seed of ``scenario`` finds the bug, and is clean without it. ``first_seed``: one that is known to."""
    said: list[str] = []
    with monkeypatch.context() as patch:
        plant(patch.setattr)
        for seed in (first_seed, *range(SEEDS_MAX)):
            said.clear()
            if simulate(scenario, seed, said.append).violations:
                break
        else:
            pytest.fail(f"{SEEDS_MAX} seeds did not notice it")
    misfits = [line for line in said if any(kind in line for kind in ("TypeError", "AttributeError", "AssertionError"))]
    assert misfits == [], "the planted function no longer fits the code that it replaces, which is no proof"
    without_bug = _violations(scenario.model_dump_json(), seed)
    assert without_bug == [], f"seed {seed} fails without the bug as well"


@functools.cache
def _violations(scenario: str, seed: int) -> list[str]:
    """Violations; most bugs are caught by one of a few seeds."""
    return simulate(Scenario.model_validate_json(scenario), seed).violations
