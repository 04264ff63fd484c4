"""A model that the engine samples otherwise than it is trained is refused with the figure, before its weights move."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest

from actors.core.watch import Gone
from actors.trainer.agreement import EngineAgreement
from actors.trainer.backend import LossSpec, MicroBatch, MicroBatchStats
from actors.trainer.batching import pad
from actors.trainer.errors import EngineDisagrees
from configs.schema import JobConfig
from tests.actors.trainer.random_samples import random_sample
from tests.actors.trainer.trainer_world import NotingBackend, World, job_config
from tests.simulated import run_simulated


def job(dtype: str = "float32", engine: str = "torch") -> JobConfig:
    return job_config(model={"source": "tiny", "dtype": dtype}, rollout={"engine": engine, "max_tokens": 8})


def batch(*, stale: bool = False) -> MicroBatch:
    made = pad([random_sample(np.random.default_rng(0), 0, 0, np.array([3, 4], np.int32), 5)])
    return dataclasses.replace(made, stale=np.full(made.input_ids.shape, stale))


def stats(apart: float) -> MicroBatchStats:
    """Of 5 tokens, each so far apart."""
    sums = {"weight": 5.0, "loss_sum": 0.0, "clipped_sum": 0.0, "kl_sum": 0.0, "entropy_sum": 0.0}
    return MicroBatchStats(tokens=5, mismatch_sum=5 * apart, **sums)


@pytest.mark.parametrize(
    ("dtype", "apart"), [("float32", 0.002), ("float32", float("nan")), ("bfloat16", 0.3), ("bfloat16", float("inf"))]
)
def test_more_than_rounding_is_refused_with_the_figure(dtype: str, apart: float) -> None:
    agreement = EngineAgreement(job(dtype), "torch")
    with pytest.raises(EngineDisagrees, match=f"step 0 .* 5 tokens.* are {apart:.3g} apart on average") as refused:
        agreement.look(batch(), stats(apart), step=0)
    assert refused.value.permanent


@pytest.mark.parametrize(("dtype", "apart"), [("float32", 1e-5), ("bfloat16", 0.05)])
def test_rounding_passes_and_later_steps_are_not_compared(dtype: str, apart: float) -> None:
    """Later, the weights have moved in the step and the batch is no evidence any more."""
    agreement = EngineAgreement(job(dtype), "torch")
    agreement.look(batch(), stats(apart), step=0)
    agreement.look(batch(), stats(5.0), step=1)


def test_tokens_of_older_weights_are_no_evidence_and_the_next_batch_is_looked_at() -> None:
    agreement = EngineAgreement(job(), "torch")
    agreement.look(batch(stale=True), stats(5.0), step=3)
    with pytest.raises(EngineDisagrees):
        agreement.look(batch(), stats(5.0), step=4)


@pytest.mark.parametrize(("engine", "backend"), [("simulated", "torch"), ("torch", "simulated")])
def test_made_up_figures_are_not_compared(engine: str, backend: str) -> None:
    EngineAgreement(job(engine=engine), backend).look(batch(), stats(5.0), step=0)


class DisagreeingBackend(NotingBackend):
    """Claims to be torch and to be half a nat away from whatever the engine said."""

    kind = "torch"

    async def accumulate(self, batch: MicroBatch, loss: LossSpec) -> MicroBatchStats:
        made = await super().accumulate(batch, loss)
        return dataclasses.replace(made, mismatch_sum=0.5 * made.tokens)


def test_the_trainer_ends_before_it_has_stepped(tmp_path: Path) -> None:
    world = World(tmp_path, job=job_config(rollout={"engine": "torch", "max_tokens": 8}), backend=DisagreeingBackend())

    async def main():
        await world.start()
        return await world.finish()

    end = run_simulated(main())
    assert end.gone is Gone.CRASHED and isinstance(end.error, EngineDisagrees)
    assert [call for call in world.backend.calls if call.startswith("step")] == [] and not world.scheduler.commits
