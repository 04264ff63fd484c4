"""Every length predictor: it answers at once, with NaN for what it does not know, and equal news give equal answers."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from actors.policies.lengths.length_predictor import (
    LearnedLengths,
    LengthHistory,
    LengthOfSiblings,
    LengthPredictor,
    PromptsView,
    prompt_keys,
)

GROUP = 4


def keys(*prompts: int) -> np.ndarray:
    return prompt_keys([np.array([p, 7], np.int32) for p in prompts])


def view(lengths: dict[int, int], *, done: int = GROUP, so_far: int | None = None) -> PromptsView:
    """Prompts with responses of so many tokens, of which the first ``done`` have finished."""
    finished = np.zeros((len(lengths), GROUP), np.bool_)
    finished[:, :done] = True
    tokens = np.repeat(np.array(list(lengths.values()), np.int32)[:, None], GROUP, axis=1)
    tokens[:, done:] = 0 if so_far is None else so_far
    return PromptsView(keys(*lengths), tokens, finished)


def history(lengths: dict[int, int]) -> tuple[LengthPredictor, PromptsView]:
    predictor = LengthHistory(1000)
    predictor.observe(view(lengths))
    return predictor, view(dict.fromkeys(lengths, 0), done=0)


def siblings(lengths: dict[int, int]) -> tuple[LengthPredictor, PromptsView]:
    return LengthOfSiblings(), view(lengths, done=1)


def learned(lengths: dict[int, int]) -> tuple[LengthPredictor, PromptsView]:
    predictor = LearnedLengths(1000)
    predictor.learn(keys(*lengths), np.array(list(lengths.values()), np.float64))
    return predictor, view(dict.fromkeys(lengths, 0), done=0)


KINDS = [history, siblings, learned]
NEW = {"history": lambda: LengthHistory(2), "siblings": LengthOfSiblings, "learned": lambda: LearnedLengths(2)}


@pytest.mark.parametrize("taught", KINDS)
def test_what_has_been_long_is_expected_to_be_long(taught: Callable[..., tuple[LengthPredictor, PromptsView]]) -> None:
    predictor, now = taught({1: 10, 2: 300, 3: 40})
    assert np.argsort(predictor.expected(now)).tolist() == [0, 2, 1]
    assert predictor.expected(now).tolist() == predictor.expected(now).tolist()


@pytest.mark.parametrize("make", NEW.values(), ids=NEW)
def test_of_a_new_prompt_nothing_is_known(make: Callable[[], LengthPredictor]) -> None:
    fresh = view({1: 0, 2: 0}, done=0)
    assert np.isnan(make().expected(fresh)).all()
    assert (
        make().expected(PromptsView(keys(), np.zeros((0, GROUP), np.int32), np.zeros((0, GROUP), np.bool_))).size == 0
    )


@pytest.mark.parametrize("make", NEW.values(), ids=NEW)
def test_memory_is_bounded(make: Callable[[], LengthPredictor]) -> None:
    predictor = make()
    for prompt in range(5):
        predictor.observe(view({prompt: 10}))
        if isinstance(predictor, LearnedLengths):
            predictor.learn(keys(prompt), np.array([10.0]))
    known = ~np.isnan(predictor.expected(view(dict.fromkeys(range(5), 0), done=0)))
    assert known.sum() <= 2
    assert known.tolist() == sorted(known.tolist()), "the newest are kept"


def test_history_follows_a_prompt_through_the_epochs_and_ignores_groups_that_were_dropped() -> None:
    predictor = LengthHistory(10)
    for length in (100, 200):
        predictor.observe(view({1: length}))
    predictor.observe(view({1: 0}, done=0))
    assert predictor.expected(view({1: 0}, done=0)).tolist() == [150.0]


def test_running_siblings_stretch_what_the_finished_ones_say() -> None:
    alone, longer = view({1: 20}, done=2), view({1: 20}, done=2, so_far=90)
    assert LengthOfSiblings().expected(alone).tolist() == [20.0]
    assert LengthOfSiblings().expected(longer).tolist() == [(20 + 20 + 90 + 90) / 2]


def test_a_group_of_which_none_has_finished_counts_as_long_once_it_is_longer_than_others_are_expected_to_be() -> None:
    done, running = view({1: 20}), view({2: 0}, done=0, so_far=50)
    both = PromptsView(
        np.concatenate([done.keys, running.keys]),
        np.concatenate([done.lengths, running.lengths]),
        np.concatenate([done.finished, running.finished]),
    )
    assert LengthOfSiblings().expected(both).tolist() == [20.0, 50.0]
