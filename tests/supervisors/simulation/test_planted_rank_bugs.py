"""Simulations catch bugs of rank groups, as those of ``test_planted_bugs.py``."""

from __future__ import annotations

import pytest

from tests.supervisors.simulation.catching import assert_caught
from tests.supervisors.simulation.planted_rank_bugs import FOCUS, PLANTED, SEEDS
from tests.supervisors.simulation.scenarios import rank_groups


@pytest.mark.parametrize("name", PLANTED)
def test_a_planted_bug_of_rank_groups_is_caught_by_some_seed(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert_caught(PLANTED[name], rank_groups(**FOCUS[name]), SEEDS[name], monkeypatch)
