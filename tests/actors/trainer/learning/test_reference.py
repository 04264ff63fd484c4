"""Reference log-probabilities: each sample's once, early where there is time, and of the tokens that are trained."""

from __future__ import annotations

import asyncio

import msgspec
import numpy as np
import pytest

from actors.protocol.groups import EarlySamples
from actors.trainer.backend import MicroBatch
from actors.trainer.errors import BadGrant
from actors.trainer.learning.reference import ReferenceScores
from actors.trainer.learning.samples import TrainSample, cut

BUDGET = 32


class Model:
    """Scores a token by its number, and notes what it was asked."""

    def __init__(self) -> None:
        self.asked: list[MicroBatch] = []

    async def score(self, batch: MicroBatch) -> np.ndarray:
        self.asked.append(batch)
        return -batch.input_ids.astype(np.float32)

    @property
    def rows(self) -> int:
        return sum(len(batch.lengths) for batch in self.asked)


def sample(prompt: int, sibling: int, *tokens: int) -> TrainSample:
    ids = np.array(tokens, np.int32)
    return TrainSample(
        prompt=prompt, sibling=sibling, prompt_ids=np.array([90, 91], np.int32), tokens=ids,
        logprobs=np.full(ids.size, -1.0, np.float32), stale=np.zeros(ids.size, np.bool_), advantage=1.0,
    )  # fmt: skip


def early(*samples: TrainSample, step: int = 3) -> EarlySamples:
    return EarlySamples(
        job="j", step=step, prompts=np.array([s.prompt for s in samples], np.int64),
        prompt_lengths=np.full(len(samples), 2, np.int32),
        prompt_ids=np.concatenate([s.prompt_ids for s in samples]), sizes=np.ones(len(samples), np.int32),
        siblings=np.array([s.sibling for s in samples], np.int32),
        lengths=np.array([s.tokens.size for s in samples], np.int32),
        tokens=np.concatenate([s.tokens for s in samples]),
    )  # fmt: skip


def scores(model: Model) -> ReferenceScores:
    reference = ReferenceScores(model.score, budget_tokens=BUDGET)
    reference.begin(3)
    return reference


SAMPLES = [sample(0, 0, 5, 6, 7), sample(0, 1, 8), sample(1, 0, 9, 10), sample(1, 1)]


def test_what_was_scored_early_is_not_scored_again_and_comes_with_its_scores() -> None:
    model = Model()
    reference = scores(model)

    async def main() -> list[TrainSample]:
        assert reference.offer(early(*SAMPLES[:2]))
        while reference.has_waiting:
            await reference.score_some()
        assert model.rows == 2 and reference.scored_early_tokens == 5 + 3
        return await reference.scored(SAMPLES)

    scored = asyncio.run(main())
    assert model.rows == 3, "the one that was not offered, and not the one without a response"
    for before, after in zip(SAMPLES[:3], scored, strict=False):
        assert after.reference_logprobs is not None
        assert after.reference_logprobs.tolist() == [-float(token) for token in before.tokens]
    assert scored[3].reference_logprobs is None
    (batch,) = cut(scored, budget_tokens=BUDGET, keep_zero=True)
    assert batch.reference_logprobs is not None
    assert np.array_equal(batch.reference_logprobs, np.where(batch.loss_weight > 0, -batch.input_ids, 0))


def test_a_sample_that_comes_back_with_other_tokens_is_scored_anew() -> None:
    model = Model()
    reference = scores(model)

    async def main() -> list[TrainSample]:
        reference.offer(early(sample(0, 0, 5, 6, 7)))
        await reference.score_some()
        return await reference.scored([sample(0, 0, 5, 6, 8)])

    (scored,) = asyncio.run(main())
    assert model.rows == 2
    assert scored.reference_logprobs is not None and scored.reference_logprobs.tolist() == [-5.0, -6.0, -8.0]


def test_samples_that_nobody_scored_early_are_scored_in_the_micro_batches_that_they_are_trained_in() -> None:
    model = Model()
    many = [sample(p, s, *range(1, 2 + (3 * p + s) % 7)) for p in range(6) for s in range(2)]
    scored = asyncio.run(scores(model).scored(many))
    trained = cut(scored, budget_tokens=BUDGET, keep_zero=True)
    assert len(trained) > 1
    for asked, batch in zip(model.asked, trained, strict=True):
        assert np.array_equal(asked.input_ids, batch.input_ids)


def test_a_micro_batch_scored_early_holds_no_more_than_one_that_is_trained() -> None:
    model = Model()
    reference = scores(model)

    async def main() -> None:
        reference.offer(early(*[sample(p, 0, *range(1, 9)) for p in range(8)]))
        while reference.has_waiting:
            await reference.score_some()

    asyncio.run(main())
    assert len(model.asked) > 1 and max(batch.input_ids.size for batch in model.asked) <= BUDGET


def test_samples_of_another_step_or_known_ones_are_not_taken() -> None:
    reference = scores(Model())

    async def main() -> None:
        assert not reference.offer(early(SAMPLES[0], step=2)) and not reference.has_waiting
        reference.offer(early(SAMPLES[0]))
        await reference.score_some()
        assert not reference.offer(early(SAMPLES[0])) and not reference.has_waiting
        reference.begin(4)
        assert not reference.offer(early(SAMPLES[1])), "it is of the step before"

    asyncio.run(main())


@pytest.mark.parametrize("column", ["prompt_lengths", "prompt_ids", "sizes", "siblings", "lengths", "tokens"])
def test_a_column_that_does_not_fit_the_others_is_refused(column: str) -> None:
    message = early(*SAMPLES[:3])
    broken = msgspec.structs.replace(message, **{column: getattr(message, column)[:-1]})
    with pytest.raises(BadGrant, match=r"early samples of step 3: .* entries, expected"):
        scores(Model()).offer(broken)
