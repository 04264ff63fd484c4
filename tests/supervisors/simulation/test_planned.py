"""``scheduling.policy: planned``, the whole system in virtual time: parts are cut, and workers sleep and wake."""

from __future__ import annotations

from typing import Any

import pytest

from actors.fleet.scope import JobScope
from actors.rollout.engine import StepOutput
from actors.rollout.engines.simulated_engine import SimulatedEngine
from configs.scenario import Scenario
from supervisors.simulation.runner import Outcome, simulate
from tests.supervisors.simulation.scenarios import scenario

KILLS = {"faults": [5, 8], "kinds": ["kill"], "roles": ["rollout"], "within_s": 25.0, "at_messages": 0.8}


class Seen:
    def __init__(self) -> None:
        self.cut = self.tokens = 0


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> Seen:
    noted, record, step = Seen(), JobScope.record, SimulatedEngine.step

    def noting_record(self: JobScope, name: str, **fields: Any) -> None:
        noted.cut += fields["samples"] if name == "samples_cut" else 0
        record(self, name, **fields)

    async def noting_step(self: SimulatedEngine) -> StepOutput:
        output = await step(self)
        noted.tokens += len(output.tokens)
        return output

    monkeypatch.setattr(JobScope, "record", noting_record)
    monkeypatch.setattr(SimulatedEngine, "step", noting_step)
    return noted


def job(mode: str, cut_at: float, faults: dict[str, Any] | None = None, **changes: Any) -> Scenario:
    fields = {
        "name": "a", "mode": mode, "steps": 4, "workers": 3, "workers_max": 3, "prompts": 12, "prompts_per_step": 6,
        "group_size": 4, "max_running": 12, "max_tokens": 40, "mean_tokens": 20.0, "decode_s": 0.05,
        "window_prompts": 3 if mode == "minibatch" else 0, "length_ranking": "history", "policy": "planned",
        "plan": {"choose": "fixed", "cut_at": cut_at},
    }  # fmt: skip
    more = {} if faults is None else {"faults": {"random": faults}}
    return scenario(jobs=[fields | changes], costs={"wake_s": 0.4}, **more)


def run(planned: Scenario, seed: int = 3) -> Outcome:
    outcome = simulate(planned, seed)
    assert outcome.violations == [], "\n".join([*outcome.violations, outcome.report])
    return outcome


@pytest.mark.parametrize("mode", ["sync", "minibatch"])
def test_the_same_is_learned_with_and_without_cuts_and_without_a_plan(seen: Seen, mode: str) -> None:
    """Nor is any token generated twice."""
    assigned = run(job(mode, 1.0, policy="assign", plan={}, workers_max=None))
    tokens, seen.tokens = seen.tokens, 0
    whole = run(job(mode, 1.0))
    assert (seen.tokens, seen.cut) == (tokens, 0)
    seen.tokens = 0
    cut = run(job(mode, 0.3))
    assert seen.tokens == tokens and seen.cut > 10
    assert cut.learned == whole.learned == assigned.learned


def test_workers_that_are_killed_among_cuts_change_nothing_that_is_learned(seen: Seen) -> None:
    calm = run(job("sync", 0.3), 5)
    harmed = run(job("sync", 0.3, KILLS), 5)
    assert len(harmed.faults) >= 3 and seen.cut > 10
    assert harmed.learned == calm.learned
