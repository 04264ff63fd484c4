"""What people are told of steps that are committed and yet teach little: once, and again when it has doubled."""

from __future__ import annotations

import pytest

from actors.jobs.summary import Row, Summary, row_of
from actors.jobs.troubles import RunWatch, Warned
from actors.protocol.job_news import Trouble
from configs.limits import Limits


def watched(rows: list[Row], **limits: float) -> list[tuple[int, Warned]]:
    """(number of the step, what was told of it)."""
    told: list[tuple[int, Warned]] = []
    watch = RunWatch(Limits.model_validate(limits), lambda warned: told.append((step, warned)))
    step = 0
    for step, row in enumerate(rows, 1):  # noqa: B007 (the watch's listener reads it)
        watch.step(row, {"no_result: why": int(row["samples_dropped"] or 0)})
    return told


def row(**changes: float) -> Row:
    plain: Row = {"samples": 8, "samples_dropped": 0, "degenerate_fraction": 0.2, "truncated_fraction": 0.1}
    return {**plain, "reward_mean": 0.0, **changes}


def test_a_good_run_is_told_nothing_of() -> None:
    assert watched([row()] * 50) == []


def test_groups_that_all_agree_are_told_of_after_some_steps_in_a_row() -> None:
    told = watched([row(degenerate_fraction=1.0)] * 20)
    assert [step for step, _ in told] == [4, 8, 16]
    assert "each group's samples had one reward (mean 0.000)" in told[0][1].text and "finer" in told[0][1].text
    assert watched([*[row(degenerate_fraction=1.0)] * 3, row()] * 5) == []


def test_responses_that_are_cut_are_told_of_with_their_share() -> None:
    told = watched([row(truncated_fraction=0.75)] * 4)
    assert [(step, warned.kind) for step, warned in told] == [(4, "responses_cut")]
    assert "75%" in told[0][1].text and "rollout.max_tokens" in told[0][1].text
    assert watched([row(truncated_fraction=0.5)] * 20) == []


def test_episodes_that_are_cut_are_told_of_with_the_bound_that_cut_most_of_them() -> None:
    ends = {"ended_by_max_tokens": 0.0, "ended_by_turn_tokens": 0.5, "ended_by_mid_turn": 0.25}
    (_, warned), *_ = watched([row(truncated_fraction=0.75, **ends)] * 4)
    assert "most episodes were cut at environment.turn_tokens, or else (75% in the last one)" in warned.text
    assert "raise it" in warned.text and "max_tokens" not in warned.text
    (_, warned), *_ = watched([row(truncated_fraction=0.75, ended_by_mid_turn=0.75)] * 4)
    assert "ended by an agent while the model was speaking (75%" in warned.text and "wait longer" in warned.text


def test_a_few_dropped_samples_are_not_worth_a_word() -> None:
    assert watched([row(samples=99, samples_dropped=1)] * 20) == []
    assert [step for step, _ in watched([row(samples=7, samples_dropped=1)] * 20)] == [1, 2, 4, 8, 16]


def test_each_kind_of_trouble_is_told_once_and_again_when_it_has_doubled() -> None:
    told: list[Warned] = []
    watch = RunWatch(Limits(), told.append)
    for _ in range(9):
        watch.trouble(Trouble(job="j", kind="a", text="it broke"))
    watch.trouble(Trouble(job="j", kind="b", text="other"))
    assert [(w.kind, w.times) for w in told] == [("a", 1), ("a", 2), ("a", 4), ("a", 8), ("b", 1)]
    assert told[0].text == "it broke" and told[1].text == "it broke (2 times so far)"


def test_kinds_are_forgotten_before_they_fill_the_memory() -> None:
    watch = RunWatch(Limits(troubles_kept=4), lambda _: None)
    for kind in range(1000):
        watch.trouble(Trouble(job="j", kind=str(kind), text=""))
    assert len(watch._counts) == 4


def test_a_mean_of_nothing_is_none_in_a_row_and_in_no_sum() -> None:
    empty = row_of({"step": 1.0, "reward_mean": float("nan"), "samples": 0.0, "samples_dropped": 8.0})
    assert empty == {"step": 1, "reward_mean": None, "samples": 0, "samples_dropped": 8}
    summary = Summary()
    summary.add(empty)
    assert summary.reward_first is None and summary.reward_last is None
    summary.add(row_of({"step": 2.0, "reward_mean": 0.5, "samples": 8.0}))
    assert summary.reward_last == pytest.approx(0.5) and summary.samples_dropped == 8


def test_a_resumed_run_is_given_as_many_steps_as_may_have_been_dropped_before_it() -> None:
    """Those had been generated ahead: their samples are gone, whatever has been mended since."""
    told: list[Warned] = []
    watch, empty = RunWatch(Limits(empty_steps_max=3), told.append), row(samples=0, samples_dropped=8)
    watch.take_over([row(), empty, empty, empty], ahead=2)
    assert watch.hopeless_before and not watch.hopeless
    for _ in range(2):
        watch.step(empty, {"no_result: why": 8})
    assert not watch.hopeless
    watch.step(row(), {})
    assert not watch.hopeless
    for _ in range(3):
        assert not watch.hopeless
        watch.step(empty, {"no_result: why": 8})
    assert watch.hopeless.startswith("no sample of 3 steps in a row")
    assert "of the last 2 steps had no verdict: why" in told[1].text, "and not of those before it"


def test_a_resumed_run_that_nobody_has_mended_ends_too() -> None:
    watch, empty = RunWatch(Limits(empty_steps_max=3), lambda _: None), row(samples=0, samples_dropped=8)
    watch.take_over([empty] * 3, ahead=2)
    for _ in range(5):
        assert not watch.hopeless
        watch.step(empty, {"no_result: why": 8})
    assert watch.hopeless


def test_updates_that_are_skipped_are_told_of() -> None:
    told = watched([row(update_skipped=1.0, step=step) for step in range(4)])
    assert [step for step, _ in told] == [1, 2, 4]
    assert told[2][1].text.startswith("the gradient of step 3 was not finite, so its update was skipped (4 so far)")
