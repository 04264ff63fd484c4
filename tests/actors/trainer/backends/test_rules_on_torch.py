"""Every rule on a real model: what was good gets likelier, what was bad less; an environment's tokens do not count."""

from __future__ import annotations

import asyncio
import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from actors.trainer.backend import BackendSpec, MicroBatch
from actors.trainer.backends.torch.torch_backend import TorchBackend
from actors.trainer.learning.rules import ADVANTAGES, LearningRule
from actors.trainer.learning.samples import TrainSample, cut, pad
from actors.trainer.learning.step_estimates import StepEstimates
from actors.trainer.setup import loss_spec
from actors.trainer.updates import with_old_logprobs
from configs.schema import JobConfig
from tests.actors.trainer.random_samples import random_sample
from tests.smallest_job import smallest_job
from tests.tiny_checkpoint import make_tiny_checkpoint

WITHOUT_CRITIC = sorted(set(ADVANTAGES) - {"ppo"})


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_checkpoint(tmp_path_factory.mktemp("model"))


async def scored(backend: TorchBackend, batch: MicroBatch) -> np.ndarray:
    return await backend.score(batch, temperature=1.0, reference=False)


async def made(backend: TorchBackend, job: JobConfig) -> list[TrainSample]:
    """Two siblings of 6 and 9 tokens, the first good, as an engine of the same weights would have drawn them."""
    rng, rule = np.random.default_rng(1), LearningRule(job.algorithm, 64)
    ids = rng.integers(3, 99, 4).astype(np.int32)
    advantages = rule.advantages(np.array([1.0, 0.0]), np.array([6, 9]))
    plain = [random_sample(rng, 0, n, ids, size) for n, size in enumerate((6, 9))]
    samples = await with_old_logprobs(plain, lambda batch: scored(backend, batch), budget_tokens=1000)
    return [
        dataclasses.replace(
            s, logprobs=s.old_logprobs, stale=np.zeros(s.tokens.size, np.bool_), advantage=float(a),
            weight=rule.token_weight(s.tokens.size),
        )
        for s, a in zip(samples, advantages, strict=True)
    ]  # fmt: skip


@pytest.mark.parametrize("keys", [{}, {"correction": "icepop"}, {"correction": "sequence_mask"}], ids=str)
@pytest.mark.parametrize("name", WITHOUT_CRITIC)
def test_two_updates_make_the_good_response_more_likely_than_the_bad(
    model_path: Path, name: str, keys: dict[str, Any]
) -> None:
    async def main() -> None:
        job = smallest_job(algorithm={"name": name, "entropy_coefficient": 1e-3, **keys})
        backend = TorchBackend()
        await backend.start(BackendSpec(model_path=model_path, learning_rate=1e-3))
        samples = await made(backend, job)
        if job.algorithm.whitens:
            samples = await StepEstimates(job, backend.values).estimated(samples)
        before = (await scored(backend, pad(samples))).sum(1)
        for _ in range(2):
            for batch in cut(samples, budget_tokens=1000, keep_zero=True):
                await backend.accumulate(batch, loss_spec(job))
            assert (await backend.step(weight=1.0)).stats.cut_sum == 0.0
        good, bad = (await scored(backend, pad(samples))).sum(1) - before
        assert good > 0.0 > bad
        await backend.close()

    asyncio.run(main())


@pytest.mark.parametrize("name", ["grpo", "gspo"])
def test_tokens_of_an_environment_add_nothing_to_the_gradient_but_their_place(model_path: Path, name: str) -> None:
    """Their advantages and log-probabilities may be anything; a mean over a sequence is over the model's tokens."""

    async def losses(junk: float) -> tuple[float, float]:
        job = smallest_job(algorithm={"name": name})
        backend = TorchBackend()
        await backend.start(BackendSpec(model_path=model_path))
        (sample, _) = await made(backend, job)
        mask = np.array([1, 0, 1, 1, 0, 1], np.bool_)
        columns = {"logprobs": sample.logprobs, "old_logprobs": sample.old_logprobs}
        odd = {key: np.where(mask, column, junk).astype(np.float32) for key, column in columns.items()}
        batch = pad([dataclasses.replace(sample, mask=mask, weight=0.25, **odd)])
        stats = await backend.accumulate(batch, loss_spec(job))
        result = await backend.step(weight=1.0)
        await backend.close()
        assert (stats.tokens, stats.weight) == (4, 1.0)
        return result.stats.loss_sum, result.grad_norm

    assert asyncio.run(losses(0.0)) == asyncio.run(losses(-7.0))
