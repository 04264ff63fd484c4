"""Fixtures of everything that plays in the scheduler's world (``scheduler_world.py``)."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from actors.fleet.scope import JobScope
from actors.policies.seeding import offload
from actors.policies.seeding.offload import Offload, OffloadRules, StepReport
from tests.actors.scheduler_world import World, config, play_in


@pytest.fixture
def in_world() -> Callable[..., None]:
    """``in_world(scenario, **job_changes)`` plays it in a plain world."""

    def run(scenario: Callable[[World], Awaitable[None]], *, seed: int = 0, **changes: Any) -> None:
        play_in(World, config(**changes), scenario, seed)

    return run


@pytest.fixture
def events(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """That the scheduler recorded."""
    noted, record = list[dict[str, Any]](), JobScope.record

    def noting(self: JobScope, name: str, **fields: Any) -> None:
        noted.append({"event": name, **fields})
        record(self, name, **fields)

    monkeypatch.setattr(JobScope, "record", noting)
    return noted


@pytest.fixture
def reports(monkeypatch: pytest.MonkeyPatch) -> list[StepReport]:
    """Of each step, as the policy of the window was told."""
    noted, after_step = list[StepReport](), offload.after_step

    def noting(rules: OffloadRules, now: Offload, report: StepReport) -> Offload:
        noted.append(report)
        return after_step(rules, now, report)

    monkeypatch.setattr(offload, "after_step", noting)
    return noted
