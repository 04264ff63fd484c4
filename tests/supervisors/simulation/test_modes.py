"""Modes of consumption, the whole system in virtual time: what overlaps with what, and what does not.

A step of the engine and a micro-batch of the backend are intervals on the virtual clock; which of them intersect is the
proof of an overlap, or of the lack of one.
"""

from __future__ import annotations

import asyncio
import itertools
from dataclasses import dataclass, field
from typing import Any

import pytest

from actors.protocol.training import AdamStep
from actors.rollout.engine import StepOutput
from actors.rollout.engines.simulated_engine import SimulatedEngine
from actors.trainer.backend import LossSpec, MicroBatch, MicroBatchStats, StepResult
from actors.trainer.backends.simulated_backend import SimulatedBackend
from configs.scenario import Scenario
from supervisors.simulation.runner import Outcome, simulate
from tests.supervisors.simulation.scenarios import scenario

Interval = tuple[float, float]
TRAIN_BOUND = {"max_tokens": 8, "mean_tokens": 4.0}
"""Short responses: with a slower trainer the next step is generated long before this one is trained."""


@dataclass
class Seen:
    generating: list[tuple[float, float, int]] = field(default_factory=list)
    """Begin, end, version."""
    training: list[Interval] = field(default_factory=list)
    stepped: list[float] = field(default_factory=list)
    """When each optimizer step was done."""
    train_token_s: float = 0.002
    """The scenario's own cost is that of a micro-batch however small, which would hold small ones against a mode."""

    def overlap_s(self) -> float:
        """How long the trainer computed while some engine did."""
        cuts = sorted({t for begin, end, *_ in [*self.generating, *self.training] for t in (begin, end)})
        both = 0.0
        for begin, end in itertools.pairwise(cuts):
            middle = (begin + end) / 2
            if any(b < middle < e for b, e in self.training) and any(b < middle < e for b, e, _ in self.generating):
                both += end - begin
        return both

    @property
    def seconds_a_step(self) -> float:
        return (self.stepped[-1] - self.stepped[0]) / (len(self.stepped) - 1)


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> Seen:
    noted = Seen()
    step, accumulate, optimize = SimulatedEngine.step, SimulatedBackend.accumulate, SimulatedBackend.step

    async def noting_step(self: SimulatedEngine) -> StepOutput:
        began = asyncio.get_running_loop().time()
        output = await step(self)
        noted.generating.append((began, asyncio.get_running_loop().time(), output.policy_version))
        return output

    async def noting_accumulate(self: SimulatedBackend, batch: MicroBatch, loss: LossSpec) -> MicroBatchStats:
        began = asyncio.get_running_loop().time()
        await asyncio.sleep(noted.train_token_s * int(batch.lengths.sum()))
        stats = await accumulate(self, batch, loss)
        noted.training.append((began, asyncio.get_running_loop().time()))
        return stats

    async def noting_optimize(self: SimulatedBackend, *, weight: float, adam: AdamStep | None = None) -> StepResult:
        result = await optimize(self, weight=weight, adam=adam)
        noted.stepped.append(asyncio.get_running_loop().time())
        return result

    monkeypatch.setattr(SimulatedEngine, "step", noting_step)
    monkeypatch.setattr(SimulatedBackend, "accumulate", noting_accumulate)
    monkeypatch.setattr(SimulatedBackend, "step", noting_optimize)
    return noted


def long_tailed(mode: str, **job: Any) -> Scenario:
    """Two workers, 8 prompts of 4 samples a step, about a second of training."""
    fields = {
        "name": "a", "mode": mode, "steps": 5, "prompts_per_step": 8, "group_size": 4, "max_running": 8,
        "max_tokens": 60, "mean_tokens": 12.0, "checkpoint_every": 0, "window_prompts": 2 if mode == "minibatch" else 0,
    }  # fmt: skip
    return scenario(
        jobs=[fields | job],
        costs={"engine_step_s": 0.1, "micro_batch_s": 0.02, "train_step_s": 0.2, "export_s": 0.05, "load_s": 0.3},
    )


def run(mode: str, *, seed: int = 3, **job: Any) -> Outcome:
    outcome = simulate(long_tailed(mode, **job), seed)
    assert outcome.violations == []
    return outcome


def test_in_sync_mode_workers_idle_while_the_trainer_computes_and_it_while_they_do(seen: Seen) -> None:
    run("sync")
    assert seen.overlap_s() == 0.0


@pytest.mark.parametrize("mode", ["minibatch", "dynamic"])
def test_streaming_trains_while_the_tail_is_generated_and_no_sample_is_off_policy(seen: Seen, mode: str) -> None:
    run(mode)
    assert seen.overlap_s() > 1.0
    for begin, _, version in seen.generating:
        assert version == sum(done <= begin for done in seen.stepped), "generation of a step begins with its version"


def test_dynamic_begins_no_later_than_a_fixed_first_chunk_that_may_be_held_up_by_one_long_sample(seen: Seen) -> None:
    run("dynamic")
    dynamic = seen.seconds_a_step
    seen.training.clear(), seen.generating.clear(), seen.stepped.clear()
    run("minibatch")
    assert dynamic < seen.seconds_a_step


def test_with_a_barrier_the_next_step_is_generated_beside_training_and_never_ahead_of_the_weights(seen: Seen) -> None:
    run("one_step_barrier")
    assert seen.overlap_s() > 1.0
    first_of_version = {v: min(b for b, _, version in seen.generating if version == v) for v in range(1, 5)}
    assert all(begin > seen.stepped[version - 1] for version, begin in first_of_version.items())


def pauses_s(seen: Seen) -> list[float]:
    """From each optimizer step to the first micro-batch of the next one."""
    return [min(b for b, _ in seen.training if b > done) - done for done in seen.stepped[1:-1]]


def test_with_a_barrier_the_trainer_waits_until_its_weights_are_exported_and_loaded(seen: Seen) -> None:
    seen.train_token_s = 0.01
    run("one_step_barrier", **TRAIN_BOUND)
    assert min(pauses_s(seen)) >= 0.05 + 0.3


def test_without_a_barrier_it_goes_on_while_they_are_on_their_way(seen: Seen) -> None:
    seen.train_token_s = 0.01
    run("async", seed=1, **TRAIN_BOUND)  # whose second step is not short of samples
    assert seen.overlap_s() > 1.0
    assert sorted(pauses_s(seen))[1] < 0.3, "of three, two do not wait for anything"


def test_what_the_modes_cost_is_in_the_order_that_they_promise(seen: Seen) -> None:
    seconds: dict[str, float] = {}
    for mode in ("sync", "dynamic", "one_step_barrier", "async"):
        seen.training.clear(), seen.generating.clear(), seen.stepped.clear()
        run(mode, steps=8)
        seconds[mode] = seen.seconds_a_step
    assert seconds["async"] < seconds["one_step_barrier"] < seconds["sync"]
    assert seconds["dynamic"] < seconds["sync"]


@pytest.mark.parametrize("ranking", ["history", "siblings", "learned"])
def test_no_ranking_changes_what_is_learned(ranking: str) -> None:
    """Weights and samples of an on-policy run, bit for bit; there is room for a quarter of the samples at once."""
    plain = run("sync", max_running=4)
    ranked = run("sync", max_running=4, length_ranking=ranking)
    assert ranked.learned == plain.learned
    assert ranked.hash != plain.hash, "but other things happened on the way"


@pytest.mark.parametrize(
    ("mode", "role"),
    [
        ("dynamic", "rollout"),
        ("dynamic", "head"),
        ("one_step_barrier", "rollout"),
        ("one_step_barrier", "trainer"),
        ("one_step_barrier", "head"),
        ("minibatch", "trainer"),
    ],
)
def test_a_kill_in_any_mode_loses_nothing(mode: str, role: str) -> None:
    kill = {"kind": "kill", "target": {"role": role}, "at_s": 4.0}
    planned = long_tailed(mode, length_ranking="learned").model_copy(
        update={"faults": scenario(faults={"plan": [kill]}).faults}
    )
    outcome = simulate(planned, 5)
    assert (outcome.violations, len(outcome.faults)) == ([], 1)
