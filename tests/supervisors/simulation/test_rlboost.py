"""``scheduling.policy: rlboost``, the whole system in virtual time: samples move between healthy workers."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from actors.fleet.scope import JobScope
from actors.rollout.engine import StepOutput
from actors.rollout.engines.simulated_engine import SimulatedEngine
from configs.scenario import Scenario
from supervisors.simulation.runner import Outcome, simulate
from tests.supervisors.simulation.scenarios import scenario

COSTS = {"engine_step_s": 0.1, "micro_batch_s": 0.02, "train_step_s": 0.2, "load_s": 0.3}
DECODE_S = 0.1
"""Of a step of 16 sequences, all but a sixteenth is decoding: beyond that a batch gains next to nothing."""


@dataclass
class Seen:
    moves: list[dict[str, Any]] = field(default_factory=list)
    tokens: int = 0
    """That engines generated, wherever they went."""


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> Seen:
    noted, record, step = Seen(), JobScope.record, SimulatedEngine.step

    def noting_record(self: JobScope, name: str, **fields: Any) -> None:
        if name == "samples_balanced":
            noted.moves.append(fields)
        record(self, name, **fields)

    async def noting_step(self: SimulatedEngine) -> StepOutput:
        output = await step(self)
        noted.tokens += len(output.tokens)
        return output

    monkeypatch.setattr(JobScope, "record", noting_record)
    monkeypatch.setattr(SimulatedEngine, "step", noting_step)
    return noted


def late_machine(tmp_path: Path, policy: str, **job: Any) -> Scenario:
    """One worker on the head's machine holds a whole step; in the second one a machine with another worker comes."""
    trace = tmp_path / "late.csv"
    trace.write_text("at_s,node,event,kind\n44.0,late,up,spot\n")
    fields = {
        "name": "a", "steps": 3, "workers": 1, "place_rollout": "elastic", "prompts_per_step": 8, "group_size": 4,
        "max_running": 40, "max_tokens": 20, "mean_tokens": 15.0, "decode_s": DECODE_S, "checkpoint_every": 0,
        "policy": policy,
    }  # fmt: skip
    return scenario(jobs=[fields | job], costs=COSTS, slots=1, spot={"trace": str(trace)})


def run(planned: Scenario, seed: int = 3) -> Outcome:
    outcome = simulate(planned, seed)
    assert outcome.violations == [], "\n".join([*outcome.violations, outcome.report])
    return outcome


def test_a_worker_that_comes_in_the_middle_of_a_step_takes_over_samples_that_run(seen: Seen, tmp_path: Path) -> None:
    """Same weights and samples as where they stay, in less time, and no token is generated twice."""
    plain = run(late_machine(tmp_path, "assign"))
    assert seen.moves == []
    tokens, seen.tokens = seen.tokens, 0
    moved = run(late_machine(tmp_path, "rlboost"))
    running = [move for move in seen.moves if move["running"]]
    assert running[0]["target"] == "rollout-late"
    assert sum(move["samples"] for move in running) >= 8
    assert moved.learned == plain.learned
    assert seen.tokens == tokens
    assert moved.virtual_seconds < plain.virtual_seconds


def test_what_an_engine_cannot_begin_goes_to_one_that_can(seen: Seen, tmp_path: Path) -> None:
    """Its cache is full long before its slots are, so most of what it was given at first waits there."""
    limited = {"kv_tokens": 80, "prompt_tokens": 8}
    plain = run(late_machine(tmp_path, "assign", **limited))
    tokens, seen.tokens = seen.tokens, 0
    moved = run(late_machine(tmp_path, "rlboost", **limited))
    assert sum(move["samples"] for move in seen.moves if not move["running"]) >= 2
    assert moved.learned == plain.learned
    assert seen.tokens == tokens
    assert moved.virtual_seconds < plain.virtual_seconds


@pytest.mark.parametrize(("mode", "role"), [("sync", "rollout"), ("dynamic", "head"), ("async", "trainer")])
def test_a_kill_among_moves_loses_nothing(mode: str, role: str, tmp_path: Path) -> None:
    kill = {"kind": "kill", "target": {"role": role}, "at_s": 46.0}
    planned = late_machine(tmp_path, "rlboost", mode=mode, steps=4)
    struck = planned.model_copy(update={"faults": scenario(faults={"plan": [kill]}).faults})
    assert len(run(struck, 5).faults) == 1
