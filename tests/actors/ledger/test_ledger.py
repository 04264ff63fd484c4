"""The ledger's rules one by one; ``tests/properties`` has the random schedules."""

from __future__ import annotations

import numpy as np
import pytest

from actors.ledger import events as ev
from actors.ledger.batch import SampleState
from actors.ledger.errors import IllegalTransition
from actors.ledger.ledger import Ledger, Outcome
from actors.ledger.slots import TERM_STRIDE
from actors.protocol.work import SamplingParams
from actors.scheduler.progress import StallView, waiting_for

ROWS = np.arange(4, dtype=np.int32)


def issued(step: int = 0, first_prompt: int | None = None) -> ev.BatchIssued:
    first = 2 * step if first_prompt is None else first_prompt
    sampling = SamplingParams(max_tokens=4, stop_token_ids=(9,))
    prompts, lengths = np.arange(first, first + 2), np.ones(2, np.int32)
    return ev.BatchIssued(step, 2, sampling, prompts, lengths, lengths, [b"", b""])


def fresh() -> Ledger:
    ledger = Ledger()
    ledger.apply(ev.Opened(1))
    ledger.apply(issued())
    return ledger


def deliver(
    ledger: Ledger, rows: list[int], tokens: list[int], finish: int = 0, worker: str = "w", at: int = 0
) -> Outcome:
    """``tokens`` to each of ``rows``, of the newest hand-out of each."""
    n, batch = len(rows), ledger.batches[0]
    event = ev.TokensAppended.one(
        worker, 0, batch.assignment[rows].copy(), np.full(n, at, np.int32), np.full(n, len(tokens), np.int32),
        np.full(n, finish, np.uint8), np.tile(np.array(tokens, np.int32), n), np.zeros(n * len(tokens), np.float32),
    )  # fmt: skip
    return ledger.apply(event)


def scored() -> Ledger:
    ledger = fresh()
    ledger.apply(ev.Assigned.to_one("w", 0, ledger.next_assignment, ROWS))
    deliver(ledger, [0, 1, 2, 3], [5, 9], finish=1)
    ledger.apply(ev.Scored(0, ROWS, np.ones(4)))
    return ledger


def commit(rows: list[int]) -> ev.Committed:
    return ev.Committed(0, np.array(rows) // 2, np.array(rows, np.int32) % 2, 1)


def test_a_stop_token_that_is_held_is_honoured_when_the_worker_dies() -> None:
    ledger = fresh()
    ledger.apply(ev.Assigned.to_one("w", 0, ledger.next_assignment, ROWS))
    deliver(ledger, [0], [5, 9])
    deliver(ledger, [1], [5, 6, 7, 8])
    deliver(ledger, [2], [5])
    outcome = ledger.apply(ev.Returned("w", ledger.in_flight("w"), "killed"))
    assert sorted(outcome.finished[0].tolist()) == [0, 1] and sorted(outcome.queued[0].tolist()) == [2, 3]
    assert ledger.batches[0].finish[:2].tolist() == [1, 2], "stop token, spent budget"


def test_a_new_term_numbers_anew_and_knows_no_older_hand_out() -> None:
    ledger = fresh()
    ledger.apply(ev.Assigned.to_one("w", 0, ledger.next_assignment, ROWS))
    late = ledger.batches[0].assignment.copy()
    ledger.apply(ev.Opened(2))
    assert ledger.next_assignment == 2 * TERM_STRIDE
    event = ev.TokensAppended.one(
        "w", 0, late, np.zeros(4, np.int32), np.ones(4, np.int32), np.zeros(4, np.uint8), ROWS, np.zeros(4, np.float32)
    )
    outcome = ledger.apply(event)
    assert outcome.tokens == 0 and outcome.broken["w"].tolist() == late.tolist() and ledger.counters.unknown_rows == 4


def test_a_grant_is_void_after_a_rewind_and_after_a_restart_of_the_head() -> None:
    for end in (ev.Rewound(0), ev.Opened(2)):
        ledger = scored()
        ledger.apply(ev.Granted(0, ROWS))
        ledger.apply(end)
        assert (ledger.batches[0].state == SampleState.SCORED).all()
        ledger.apply(ev.Granted(0, ROWS))


def test_what_the_trainer_does_not_name_is_counted_as_lost() -> None:
    ledger = scored()
    ledger.apply(ev.Granted(0, ROWS))
    ledger.apply(commit([0, 1]))
    assert ledger.counters.prompts_lost == 1 and ledger.batches[0].drop_reasons[2].startswith("not named")


def test_a_sample_that_another_step_has_trained_is_counted() -> None:
    """No event leads there, which is why it is counted where it would show."""
    ledger = scored()
    ledger._trained.mark(np.array([1]), 7)
    ledger.apply(ev.Granted(0, ROWS))
    ledger.apply(commit([0, 1, 2, 3]))
    assert ledger.counters.samples_trained_twice == 2, "both siblings of prompt 1"


def test_a_gap_in_the_prompt_stream_is_counted_as_lost_prompts() -> None:
    ledger = fresh()
    ledger.apply(issued(1, first_prompt=5))
    assert ledger.counters.prompts_lost == 3


@pytest.mark.parametrize(
    ("event", "why"),
    [
        (issued(), "issued already"),
        (issued(1, first_prompt=1), "belongs to an earlier step"),
        (ev.Assigned.to_one("w", 0, TERM_STRIDE, np.array([0, 0], np.int32)), "named twice"),
        (ev.Assigned.to_one("w", 0, TERM_STRIDE, np.array([4], np.int32)), "outside"),
        (ev.Assigned.to_one("w", 0, 3, ROWS), "has been given"),
        (ev.Assigned.to_one("w", 7, TERM_STRIDE, ROWS), "no batch"),
        (ev.Assigned(0, TERM_STRIDE, ["v", "w"], np.array([1, 1], np.int32), ROWS), "4 rows are handed to 2 workers"),
        (ev.Assigned(0, TERM_STRIDE, ["v", "w"], np.array([5, -1], np.int32), ROWS), "with the counts"),
        (ev.Assigned(0, TERM_STRIDE, ["v"], np.array([3, 1], np.int32), ROWS), "handed to 1 workers"),
        (ev.Scored(0, ROWS, np.ones(4)), "queued, not finished"),
        (ev.Granted(0, ROWS), "queued, not scored"),
        (commit([0, 1, 2, 3]), "queued, not granted"),
        (ev.Checkpointed(1, "p"), "ahead"),
        (ev.Rewound(1), "0 steps are committed"),
        (ev.Opened(1), "not above"),
    ],
)
def test_an_illegal_event_is_refused_and_changes_nothing(event: ev.Event, why: str) -> None:
    ledger = fresh()
    before = (ledger.count_states(), ledger.counters, ledger.trainer_step, ledger.next_assignment)
    with pytest.raises(IllegalTransition, match=why):
        ledger.apply(event)
    assert before == (ledger.count_states(), ledger.counters, ledger.trainer_step, ledger.next_assignment)


@pytest.mark.parametrize("reward", [float("nan"), float("inf")])
def test_a_reward_that_is_no_number_is_refused(reward: float) -> None:
    ledger = fresh()
    ledger.apply(ev.Assigned.to_one("w", 0, ledger.next_assignment, ROWS))
    deliver(ledger, [0, 1, 2, 3], [9], finish=1)
    with pytest.raises(IllegalTransition, match="finite"):
        ledger.apply(ev.Scored(0, ROWS, np.array([1, 1, 1, reward])))


def test_a_replay_must_name_the_same_samples() -> None:
    ledger = scored()
    ledger.apply(ev.Granted(0, ROWS))
    ledger.apply(commit([0, 1, 2, 3]))
    ledger.apply(ev.Rewound(0))
    with pytest.raises(IllegalTransition, match="same"):
        ledger.apply(commit([0, 1, 2]))
    ledger.apply(ev.Granted(0, ROWS, replay=True))
    ledger.apply(commit([3, 2, 1, 0]))
    assert ledger.committed_steps == ledger.trainer_step == 1 and ledger.counters.samples_trained_twice == 0


def committed(steps: int) -> Ledger:
    ledger = Ledger()
    ledger.apply(ev.Opened(1))
    for step in range(steps):
        ledger.apply(issued(step))
        ledger.apply(ev.Dropped(step, ROWS, "no_result"))
        ledger.apply(ev.Committed(step, np.zeros(0, np.int64), np.zeros(0, np.int32), step + 1))
    return ledger


@pytest.mark.parametrize("step", range(4))
def test_after_a_rewind_the_trainer_is_at_the_step_that_it_named_and_no_commit_is_taken_back(step: int) -> None:
    ledger = committed(3)
    ledger.apply(ev.Rewound(step))
    assert (ledger.trainer_step, ledger.committed_steps) == (step, 3)
    for replayed in range(step, 3):
        ledger.apply(ev.Granted(replayed, ROWS[:0], replay=True))
        ledger.apply(ev.Committed(replayed, np.zeros(0, np.int64), np.zeros(0, np.int32), replayed + 1))
    assert (ledger.trainer_step, ledger.committed_steps) == (3, 3)


def test_a_rewind_to_a_step_that_has_been_let_go_is_refused_and_changes_nothing() -> None:
    ledger = committed(3)
    ledger.forget(2)
    with pytest.raises(IllegalTransition, match="cannot replay from step 1: steps below 2 have been pruned"):
        ledger.apply(ev.Rewound(1))
    assert ledger.trainer_step == 3
    ledger.apply(ev.Rewound(2))
    assert ledger.trainer_step == 2


STILL = StallView(
    quiet_s=10, quiet_limit_s=5, paused=False, step=3, steps=9, issued=True, queued=0, in_flight={}, finished=0,
    has_rewards=True, has_prompts=True, has_trainer=True, workers={"a": 3}, needed_version=3, newest_version=3,
)  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"quiet_s": 1}, ""),
        ({"step": 9}, ""),
        ({"in_flight": {"a": 4, "b": 0}}, "tokens from a (4 samples), since 10 s"),
        ({"finished": 2, "has_rewards": False}, "verdicts on 2 samples: no reward worker has registered, since 10 s"),
        ({"queued": 1, "workers": {"a": 2}}, "version 3 to be loaded by a (serves 2), since 10 s"),
        ({"queued": 1}, "room at a rollout worker: 1 samples are queued, since 10 s"),
        ({"waiting": 2}, "the environments of 2 episodes, since 10 s"),
        ({"has_trainer": False}, "the trainer to open step 3, since 10 s"),
        ({}, "the trainer to commit step 3, since 10 s"),
    ],
)
def test_a_stall_is_told_in_one_sentence(changes: dict[str, object], sentence: str) -> None:
    from dataclasses import replace

    assert waiting_for(replace(STILL, **changes)) == sentence  # type: ignore[arg-type]


def test_steps_are_granted_and_committed_one_after_the_other() -> None:
    """A step that is scored early waits for its turn, and one that is committed is not committed anew."""
    ledger = scored()
    ledger.apply(issued(1))
    ledger.apply(ev.Assigned.to_one("w", 1, ledger.next_assignment, ROWS))
    event = ev.TokensAppended.one(
        "w", 0, ledger.batches[1].assignment.copy(), np.zeros(4, np.int32), np.ones(4, np.int32),
        np.ones(4, np.uint8), np.full(4, 9, np.int32), np.zeros(4, np.float32),
    )  # fmt: skip
    ledger.apply(event)
    ledger.apply(ev.Scored(1, ROWS, np.ones(4)))
    with pytest.raises(IllegalTransition, match="cannot grant, the trainer is at step 0"):
        ledger.apply(ev.Granted(1, ROWS))
    ledger.apply(ev.Granted(0, ROWS))
    ledger.apply(commit([0, 1, 2, 3]))
    with pytest.raises(IllegalTransition, match="cannot commit, the trainer is at step 1"):
        ledger.apply(commit([0, 1, 2, 3]))
    assert ledger.trainer_step == ledger.committed_steps == 1
