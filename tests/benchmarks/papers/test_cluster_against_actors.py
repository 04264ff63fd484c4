"""The cluster model against the full actor system under virtual time: one small scenario, both ways.

The actor system runs scheduler, ledger, workers, trainer and network on simulated engines. The cluster model is given
what was set and what cannot be known beforehand (how long the trainer computed), and has to come to the same times.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

import numpy as np
import pytest

from actors.policies.assigning.generation_time import Instance
from actors.trainer.backend import LossSpec, MicroBatch, MicroBatchStats
from actors.trainer.backends.simulated_backend import SimulatedBackend
from benchmarks.decisions._fleet_model import Fleet, FleetRules
from benchmarks.papers.cluster.generation import generate
from benchmarks.papers.cluster.pipeline import Batch, Stages, iteration_s
from configs.scenario import Scenario
from supervisors.simulation.runner import simulate

STEP_S, SAMPLES, PLACES, MEAN_TOKENS, MAX_TOKENS = 0.1, 32, 8, 30.0, 120
STEPS = (2, 7)
"""The time of a step is that of the longer run less that of the shorter, without start and end."""


@dataclass(frozen=True)
class Steady:
    """As the simulated engine of a scenario: the same time for any batch."""

    def step_s(self, batch: float, context_tokens: float) -> float:
        return STEP_S


def scenario(mode: str, workers: int, steps: int) -> Scenario:
    job = {
        "name": "a", "mode": mode, "steps": steps, "workers": workers,
        "prompts_per_step": SAMPLES // 4, "group_size": 4,
        "max_running": PLACES, "mean_tokens": MEAN_TOKENS, "max_tokens": MAX_TOKENS, "checkpoint_every": 0,
    }  # fmt: skip
    costs = {
        "engine_step_s": STEP_S, "prefill_s": 0.0, "micro_batch_s": 0.8, "train_step_s": 0.2, "export_s": 0.05,
        "load_s": 0.05, "verdict_s": [0.0, 0.0], "read_s": 0.0,
    }  # fmt: skip
    return Scenario.model_validate({"name": "x", "nodes": 0, "slots": 8, "jobs": [job], "costs": costs})


def actors_step_s(monkeypatch: pytest.MonkeyPatch, mode: str, workers: int) -> tuple[float, float]:
    """Seconds of a step, and how many of them the trainer accumulated."""
    computed = [0.0]
    accumulate = SimulatedBackend.accumulate

    async def timed(self: SimulatedBackend, batch: MicroBatch, loss: LossSpec) -> MicroBatchStats:
        began_s = asyncio.get_running_loop().time()
        stats = await accumulate(self, batch, loss)
        computed[0] += asyncio.get_running_loop().time() - began_s
        return stats

    monkeypatch.setattr(SimulatedBackend, "accumulate", timed)
    spent: list[tuple[float, float]] = []
    for steps in STEPS:
        computed[0] = 0.0
        outcome = simulate(scenario(mode, workers, steps), 3)
        assert outcome.violations == []
        spent.append((outcome.virtual_seconds, computed[0]))
    (short_s, short_train_s), (long_s, long_train_s) = spent
    count = STEPS[1] - STEPS[0]
    return (long_s - short_s) / count, (long_train_s - short_train_s) / count


def lengths(step: int) -> np.ndarray:
    """As the simulated engine draws them."""
    drawn = 1 + np.floor(np.random.default_rng(step).exponential(MEAN_TOKENS, SAMPLES))
    return np.minimum(drawn, MAX_TOKENS).astype(int)


def fleet_step_s(mode: str, workers: int, train_s: float) -> float:
    """The same of the fleet model, over many steps; both call policies.assign."""
    rules = FleetRules(
        max_staleness=1 if mode == "async" else 0, streaming=mode == "async", group_size=4, prompt_tokens=8,
        train_sample_s=lambda drawn: np.full(len(drawn), train_s / SAMPLES), step_s=0.3, transfer_s=0.05, round_s=0.01,
    )  # fmt: skip
    fleet = Fleet([(Steady(), PLACES)] * workers, lengths, rules)
    fleet.run(steps=60)
    return (fleet.trained_s[-1] - fleet.trained_s[9]) / 50


def batch_step_s(workers: int, train_s: float) -> float:
    """The same of a colocated batch that is dispatched once, as the paper's baseline does."""
    rng, batches = np.random.default_rng(0), list[Batch]()
    for step in range(40):
        drawn, pool = lengths(step), [Instance(Steady(), PLACES)] * workers
        finished = generate(pool, drawn, 8, dispatching="random", estimates=drawn.astype(float), rng=rng)
        batches.append(Batch(finished, np.full(SAMPLES, train_s / SAMPLES)))
    return iteration_s("colocated", batches, Stages(switch_s=0.1, step_s=0.2))


def test_both_come_to_the_same_times_and_ratios(monkeypatch: pytest.MonkeyPatch) -> None:
    """Four workers, half of them, and four ahead by a step."""
    actors: dict[str, float] = {}
    fleet: dict[str, float] = {}
    batch: dict[str, float] = {}
    for name, mode, workers in (("base", "sync", 4), ("half", "sync", 2), ("ahead", "async", 4)):
        actors[name], train_s = actors_step_s(monkeypatch, mode, workers)
        fleet[name] = fleet_step_s(mode, workers, train_s)
        if mode == "sync":
            batch[name] = batch_step_s(workers, train_s)
    shown = f"actors {actors}, fleet {fleet}, batch {batch}"
    for name, actors_s in actors.items():
        assert fleet[name] == pytest.approx(actors_s, rel=0.15), shown
        assert fleet["base"] / fleet[name] == pytest.approx(actors["base"] / actors_s, rel=0.15), shown
        assert batch.get(name, actors_s) == pytest.approx(actors_s, rel=0.15), shown
    assert actors["half"] > actors["base"] > actors["ahead"]
