"""Episodes as the trainer gets them: a sequence a context, nothing but the model's tokens to learn from, each once."""

from __future__ import annotations

import asyncio
from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from actors.protocol.groups import GroupGrant
from actors.trainer.accounts import shape_of
from actors.trainer.backend import MicroBatch
from actors.trainer.backends.simulated_backend import SimulatedBackend
from actors.trainer.errors import BadGrant
from actors.trainer.learning.rules import LearningRule
from actors.trainer.learning.samples import cut, group_samples, model_tokens, pad
from actors.trainer.learning.step_estimates import StepEstimates
from configs.learning_schema import AlgorithmConfig
from tests.smallest_job import smallest_job

GRPO = LearningRule(AlgorithmConfig(), 100)
NOTHING = np.zeros(0, np.int32)


def granted(*rows: str, rewards: tuple[float, ...] = (1.0, 0.0), step: int = 0) -> GroupGrant:
    """A group of episodes. A bar begins a fresh context, a capital is a token of the model; the rest is not."""
    letters = [[(ord(c), -1 if c.islower() else step) for c in row.replace("|", "")] for row in rows]
    for row, found in zip(rows, letters, strict=True):
        for at in (row[:i].replace("|", "") for i, c in enumerate(row) if c == "|"):
            found[len(at)] = found[len(at)][0], -2
    tokens = np.array([token for row in letters for token, _ in row], np.int32)
    return GroupGrant(
        job="j", step=step, prompt=7, replay=False, prompt_ids=NOTHING, siblings=np.arange(len(rows), dtype=np.int32),
        lengths=np.array([len(row) for row in letters], np.int32), tokens=tokens, logprobs=-tokens.astype(np.float32),
        versions=np.array([mark for row in letters for _, mark in row], np.int32),
        finished=np.ones(len(rows), np.uint8), rewards=np.array(rewards),
    )  # fmt: skip


def text(ids: np.ndarray) -> str:
    return "".join(map(chr, ids.tolist()))


def test_a_row_is_cut_where_a_fresh_context_begins_and_its_tokens_are_masked() -> None:
    samples = group_samples(granted("|askABgoCD|newEF", "|xG"), GRPO, max_staleness=0)
    assert [(s.sibling, s.context, text(s.prompt_ids), text(s.tokens)) for s in samples] == [
        (0, 0, "ask", "ABgoCD"), (0, 1, "new", "EF"), (1, 0, "x", "G"),
    ]  # fmt: skip
    first, second, third = samples
    assert first.mask is not None and first.mask.tolist() == [True, True, False, False, True, True]
    assert second.mask is third.mask is None
    assert first.advantage == second.advantage == -third.advantage != 0


def test_what_stands_behind_the_model_s_last_word_and_contexts_without_one_are_left_out() -> None:
    samples = group_samples(granted("|askABgo|new|zC", ""), GRPO, max_staleness=0)
    assert [(s.context, text(s.prompt_ids), text(s.tokens)) for s in samples] == [(0, "ask", "AB"), (2, "z", "C")]


def test_an_episode_counts_once_and_by_the_model_s_tokens_in_all_its_contexts() -> None:
    group = granted("|askABgoCD|newEF", "|xG")
    assert model_tokens(group).tolist() == [6, 1]
    shape = shape_of([group], 100)
    assert (shape.samples, shape.response_tokens) == (2, 7)
    by_mean = LearningRule(AlgorithmConfig.model_validate({"loss_mean": "sequence"}), 100)
    weights = [s.weight * s.model_tokens for s in group_samples(group, by_mean, max_staleness=0)]
    assert weights == pytest.approx([4 / 6, 2 / 6, 1.0])


def test_the_loss_is_of_the_model_s_tokens_alone() -> None:
    batch = pad(group_samples(granted("|askABgoCD|newEF", "|xG"), GRPO, max_staleness=0))
    learned = [text(batch.input_ids[row][batch.loss_weight[row] > 0]) for row in range(3)]
    assert learned == ["ABCD", "EF", "G"]
    assert batch.prompt_lengths.tolist() == [3, 3, 1] and batch.lengths.tolist() == [9, 5, 2]


def test_versions_are_looked_at_where_the_model_has_spoken() -> None:
    samples = group_samples(granted("|askABgoCD", "|xG", step=5), GRPO, max_staleness=0)
    assert not any(sample.stale.any() for sample in samples)
    group = granted("|askABgoCD", "|xG", step=5)
    group.versions[4] = 3
    assert group_samples(group, GRPO, max_staleness=2)[0].stale.tolist() == [False, True, *[False] * 4]
    with pytest.raises(BadGrant, match="versions has 3"):
        group_samples(group, GRPO, max_staleness=1)


def test_a_row_without_a_prompt_that_begins_with_no_context_is_refused() -> None:
    with pytest.raises(BadGrant, match="prompt_ids is empty"):
        group_samples(granted("|xA", "AB"), GRPO, max_staleness=0)


@pytest.mark.parametrize("name", ["reinforce_pp", "ppo"])
def test_a_rule_that_whitens_estimates_each_context_and_leaves_out_the_environment(name: str) -> None:
    algorithm = AlgorithmConfig.model_validate({"name": name})
    group = granted("|askABgoCD|newEF", "|xG")
    samples = group_samples(group, LearningRule(algorithm, 100), max_staleness=0)
    estimates = StepEstimates(smallest_job(algorithm={"name": name}), ExpectsNothing().values)
    found = asyncio.run(estimates.estimated(samples))
    assert [sample.name for sample in found] == [(7, 0, 0), (7, 0, 1), (7, 1, 0)]
    first, second, third = (np.asarray(sample.advantage) for sample in found)
    assert first[2:4].tolist() == [0, 0] and (first[[0, 1, 4, 5]] > 0).all()
    assert (second > 0).all() and (third < 0).all()


class ExpectsNothing(SimulatedBackend):
    async def values(self, batch: MicroBatch) -> np.ndarray:
        return np.zeros(batch.input_ids.shape, np.float32)


@st.composite
def rows(draw: st.DrawFn) -> str:
    contexts = draw(st.lists(st.lists(st.booleans(), max_size=6), max_size=4))
    return "".join("|x" + "".join("A" if said else "b" for said in context) for context in contexts)


@given(said=st.lists(rows(), min_size=2, max_size=4))
def test_every_token_of_the_model_is_learned_from_once(said: list[str]) -> None:
    group = granted(*said, rewards=tuple(map(float, range(len(said)))))
    numbers = np.arange(len(group.tokens), dtype=np.int32)
    group.tokens = numbers  # each one tells where it stood
    samples = group_samples(group, GRPO, max_staleness=0)
    batches = cut(samples, budget_tokens=1 << 20, keep_zero=True)
    learned = Counter(token for batch in batches for token in batch.input_ids[batch.loss_weight > 0].tolist())
    assert learned == Counter(numbers[group.versions >= 0].tolist())
