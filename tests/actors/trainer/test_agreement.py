"""A model that the engine samples otherwise than it is trained is refused with the figure, before its weights move."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from actors.core.watch import Gone
from actors.trainer.backend import NO_STATS, LossSpec, MicroBatch, MicroBatchStats
from actors.trainer.errors import EngineDisagrees
from actors.trainer.updates import EngineAgreement
from configs.schema import JobConfig
from tests.actors.trainer.trainer_world import NotingBackend, World, job_config
from tests.simulated import run_simulated


def job(dtype: str = "float32", engine: str = "torch") -> JobConfig:
    return job_config(model={"source": "tiny", "dtype": dtype}, rollout={"engine": engine, "max_tokens": 8})


def stats(apart: float, *, older: bool = False) -> MicroBatchStats:
    """Of 5 tokens, each so far apart, and of 3 of older weights, which are 9 apart; or only of these."""
    both = dataclasses.replace(NO_STATS, older_tokens=3, older_mismatch_sum=27.0)
    tokens = 0 if older else 5
    return dataclasses.replace(both, tokens=tokens + 3, mismatch_sum=tokens * apart + 27.0)


@pytest.mark.parametrize(
    ("dtype", "apart"), [("float32", 0.002), ("float32", float("nan")), ("bfloat16", 0.3), ("bfloat16", float("inf"))]
)
def test_more_than_rounding_is_refused_with_the_figure(dtype: str, apart: float) -> None:
    agreement = EngineAgreement(job(dtype), "torch")
    with pytest.raises(EngineDisagrees, match=f"step 0 .* 5 tokens.* are {apart:.3g} apart on average") as refused:
        agreement.look(stats(apart), step=0)
    assert refused.value.permanent


@pytest.mark.parametrize(("dtype", "apart"), [("float32", 1e-5), ("bfloat16", 0.05)])
def test_rounding_passes_and_later_steps_are_not_compared(dtype: str, apart: float) -> None:
    """One comparison a life is enough."""
    agreement = EngineAgreement(job(dtype), "torch")
    agreement.look(stats(apart), step=0)
    agreement.look(stats(5.0), step=1)


def test_tokens_of_older_weights_are_no_evidence_and_the_next_step_is_looked_at() -> None:
    agreement = EngineAgreement(job(), "torch")
    agreement.look(stats(5.0, older=True), step=3)
    with pytest.raises(EngineDisagrees):
        agreement.look(stats(5.0), step=4)


@pytest.mark.parametrize(("engine", "backend"), [("simulated", "torch"), ("torch", "simulated")])
def test_made_up_figures_are_not_compared(engine: str, backend: str) -> None:
    EngineAgreement(job(engine=engine), backend).look(stats(5.0), step=0)


class DisagreeingBackend(NotingBackend):
    """Claims to be torch and to be half a nat away from whatever the engine said."""

    kind = "torch"

    async def accumulate(self, batch: MicroBatch, loss: LossSpec) -> MicroBatchStats:
        made = await super().accumulate(batch, loss)
        return dataclasses.replace(made, mismatch_sum=0.5 * made.tokens)


def test_the_trainer_ends_before_its_step_is_published_or_committed(tmp_path: Path) -> None:
    world = World(tmp_path, job=job_config(rollout={"engine": "torch", "max_tokens": 8}), backend=DisagreeingBackend())

    async def main():
        await world.start()
        return await world.finish()

    end = run_simulated(main())
    assert end.gone is Gone.CRASHED and isinstance(end.error, EngineDisagrees)
    assert len([call for call in world.backend.calls if call.startswith("step")]) == 1
    assert world.weights.published == [0] and not world.scheduler.commits
