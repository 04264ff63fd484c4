"""Whether a live job's trainer would have to wait, by hand on a real ledger: what is known, and what follows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from actors.fleet.length_ranking import LengthRanking
from actors.fleet.modes import seeding_estimate
from actors.fleet.modes.seeding_estimate import SeedingEstimate
from actors.fleet.workers import Worker, WorkerTable
from actors.ledger import events as ev
from actors.ledger.ledger import Ledger
from actors.policies.assigning.latency_table import StepShape
from actors.policies.lengths.length_predictor import LearnedLengths, prompt_keys
from actors.policies.seeding import hand_over
from actors.protocol.lengths import LengthScores
from actors.protocol.work import SamplingParams
from actors.protocol.workers import RegisterWorker
from transport.address import ActorAddress, PeerId

GROUP = 2
STEP_S = 0.1
"""Of a token, whatever runs beside it."""


class Fleet:
    """A step of ``groups`` prompts with this many tokens expected of each response, and workers that are elsewhere."""

    def __init__(self, expected: Sequence[float], *, workers: int = 1, slots: int = 64, measured: bool = True) -> None:
        self.ledger, self.table = Ledger(), WorkerTable()
        self.ledger.apply(ev.Opened(1))
        self.remote = [self._worker(f"remote-{i}", slots, measured) for i in range(workers)]
        self.ranking = LengthRanking("j", LearnedLengths(10_000))
        self.issue(0, expected)
        self.now = 0.0

    def _worker(self, name: str, slots: int, measured: bool) -> Worker:
        address = ActorAddress(name, PeerId(f"n.{name}", 1), f"memory://{name}")
        offer = RegisterWorker(job="j", worker=address, node="n", engine="simulated", slots=slots, policy_version=0)
        worker = self.table.add(offer, 0.0)
        if measured:
            worker.latency.add(STEP_S, StepShape(4, 4, 40, prefilled=False), 10.0)
        return worker

    def issue(self, step: int, expected: Sequence[float]) -> None:
        """NaN: nothing is expected of that prompt."""
        n = len(expected)
        first, lengths = step * 10_000, np.ones(n, np.int32)
        ids = np.arange(first, first + n, dtype=np.int32)
        sampling = SamplingParams(max_tokens=200, stop_token_ids=(9,))
        self.ledger.apply(ev.BatchIssued(step, GROUP, sampling, ids.astype(np.int64), lengths, ids, [b""] * n))
        known = np.flatnonzero(np.isfinite(expected))
        keys = prompt_keys(self.ledger.batches[step].prompt_ids)[known]
        self.ranking.scored(LengthScores("j", 0, keys, np.array(expected, np.float64)[known]))

    def hand_out(self, worker: str, rows: Sequence[int], tokens: int = 1, step: int = 0) -> None:
        """So many tokens of each have come."""
        of = np.array(rows, np.int32)
        self.ledger.apply(ev.Assigned.to_one(worker, step, self.ledger.next_assignment, of))
        if tokens:
            self._deliver(worker, of, tokens, 0, step)

    def end(self, worker: str, rows: Sequence[int]) -> None:
        """They have ended, and have their reward."""
        of = np.array(rows, np.int32)
        self._deliver(worker, of, 1, 1, 0)
        self.ledger.apply(ev.Scored(0, of, np.ones(len(of))))

    def finish(self, worker: str, rows: Sequence[int], tokens: int) -> None:
        """They have come to so many tokens, and have their reward."""
        self.hand_out(worker, rows, tokens - 1)
        self.end(worker, rows)

    def _deliver(self, worker: str, rows: np.ndarray, tokens: int, finish: int, step: int) -> None:
        batch, n = self.ledger.batches[step], len(rows)
        ids = np.full(n * tokens, 9 if finish else 5, np.int32)
        self.ledger.apply(
            ev.TokensAppended.one(
                worker, 0, batch.assignment[rows].copy(), batch.length[rows].copy(), np.full(n, tokens, np.int32),
                np.full(n, finish, np.uint8), ids, np.zeros(n * tokens, np.float32),
            )
        )  # fmt: skip

    def says(self, train_token_s: float) -> bool | None:
        """With a trainer that takes so long for a token."""
        estimate = SeedingEstimate(self.ledger, self.ranking, 0.0, train_token_s)
        return estimate.would_not_wait(self.ledger.batches[0], self.remote, self.now)


def first_of_two(**options: bool) -> Fleet:
    """The first group's 40 tokens are there; the second's samples have 10 of 30, and 2 s to go."""
    fleet = Fleet([20, 30], **options)
    fleet.finish("remote-0", [0, 1], tokens=20)
    fleet.hand_out("remote-0", [2, 3], tokens=10)
    return fleet


@pytest.mark.parametrize(("train_token_s", "enough"), [(0.049, False), (0.051, True)])
def test_it_would_not_wait_once_what_has_come_takes_as_long_as_the_next_group_needs(
    train_token_s: float, enough: bool
) -> None:
    assert first_of_two().says(train_token_s) is enough


@pytest.mark.parametrize("begun_elsewhere", [False, True])
def test_what_nobody_else_has_begun_begins_when_the_others_have_a_place(begun_elsewhere: bool) -> None:
    """One place: the two samples of the second group come one after the other, after 2 s and 4 s."""
    fleet = Fleet([20, 30], slots=1)
    fleet.finish("local", [0, 1], tokens=20)
    fleet.hand_out("remote-0" if begun_elsewhere else "local", [2, 3], tokens=10)
    assert fleet.says(0.099) is False
    assert fleet.says(0.101) is True


def test_what_the_trainer_was_given_keeps_it_busy_for_as_long_as_it_takes_to_train() -> None:
    """40 tokens of 0.1 s each: 4 s. The other group comes after 2 s."""
    fleet = first_of_two()
    estimate = SeedingEstimate(fleet.ledger, fleet.ranking, 0.0, train_token_s=0.1)
    batch = fleet.ledger.batches[0]
    fleet.ledger.apply(ev.Granted(0, np.array([0, 1], np.int32)))
    assert estimate.would_not_wait(batch, fleet.remote, 10.0) is False
    estimate.given(40, 10.0)
    assert estimate.would_not_wait(batch, fleet.remote, 11.9) is True
    assert estimate.would_not_wait(batch, fleet.remote, 12.1) is False


def test_what_comes_with_tokens_begins_before_what_nobody_has_begun() -> None:
    """One place: two samples of 1 s each, and then two longer ones of 3 s each. The other way round it would be 6 s."""
    fleet = Fleet([20, 20, 30], slots=1)
    fleet.finish("local", [0, 1], tokens=20)
    fleet.hand_out("local", [2, 3], tokens=10)
    assert fleet.says(0.099) is False
    assert fleet.says(0.101) is True


def test_an_engine_that_holds_more_than_it_runs_runs_what_has_tokens() -> None:
    """Two places: the third group ends after 2 s, then the second begins and ends after 5 s."""
    fleet = Fleet([20, 30, 30], slots=2)
    fleet.finish("remote-0", [0, 1], tokens=20)
    fleet.hand_out("remote-0", [2, 3], tokens=0)
    fleet.hand_out("remote-0", [4, 5], tokens=10)
    assert fleet.says(0.049) is False
    assert fleet.says(0.051) is True


@pytest.mark.parametrize(("slots", "enough_s"), [(1, 9.0), (2, 4.0)])
def test_another_steps_sample_holds_a_place_and_is_not_waited_for(slots: int, enough_s: float) -> None:
    """For 5 s, in the only place or beside the two of this step, which take 2 s each."""
    fleet = Fleet([20, 30], slots=slots)
    fleet.finish("local", [0, 1], tokens=20)
    fleet.hand_out("local", [2, 3], tokens=10)
    fleet.issue(1, [60, 60])
    fleet.hand_out("remote-0", [2], tokens=10, step=1)
    assert fleet.says(0.99 * enough_s / 40) is False
    assert fleet.says(1.01 * enough_s / 40) is True


def test_a_prompt_of_which_nothing_is_expected_counts_as_the_median_of_the_others() -> None:
    fleet = Fleet([20, 30, float("nan"), 60])
    for group, tokens in ((0, 20), (1, 30), (3, 60)):
        fleet.finish("remote-0", [GROUP * group, GROUP * group + 1], tokens)
    fleet.hand_out("remote-0", [4, 5], tokens=10)
    assert fleet.says(0.99 * 2.0 / 220) is False
    assert fleet.says(1.01 * 2.0 / 220) is True


def test_nothing_is_said_without_a_trained_step_a_measured_worker_or_half_of_the_lengths() -> None:
    assert first_of_two().says(0.0) is None, "no step has been trained"
    assert first_of_two(measured=False).says(1.0) is None, "nobody elsewhere has been measured"
    fleet = Fleet([20, float("nan"), float("nan")])
    fleet.hand_out("remote-0", range(6), tokens=10)
    assert fleet.says(1.0) is None, "of one prompt in three it is known how long its responses will be"


def test_what_a_step_took_to_train_is_the_pace_of_the_next_one() -> None:
    fleet = first_of_two()
    fleet.end("remote-0", [2, 3])
    batch, estimate = fleet.ledger.batches[0], SeedingEstimate(fleet.ledger, fleet.ranking, 0.0)
    rows = np.arange(4, dtype=np.int32)
    fleet.ledger.apply(ev.Granted(0, rows))
    fleet.ledger.apply(ev.Committed(0, np.array([0, 0, 1, 1]), rows % GROUP, 1))
    estimate.committed(batch, train_s=0.0)
    assert estimate.train_token_s == 0.0, "it was not measured"
    estimate.committed(batch, train_s=6.2)
    assert estimate.train_token_s == pytest.approx(6.2 / 62)


def test_between_two_looks_the_answer_stays_and_another_step_is_looked_at_at_once() -> None:
    fleet = first_of_two()
    fleet.issue(1, [30])
    estimate = SeedingEstimate(fleet.ledger, fleet.ranking, look_every_s=1.0, train_token_s=0.1)
    this, other = fleet.ledger.batches[0], fleet.ledger.batches[1]
    assert estimate.would_not_wait(this, fleet.remote, 0.0) is True
    estimate.train_token_s = 0.01
    assert estimate.would_not_wait(this, fleet.remote, 0.9) is True
    assert estimate.would_not_wait(other, fleet.remote, 0.9) is False
    assert estimate.would_not_wait(this, fleet.remote, 1.0) is False


@pytest.mark.parametrize("third", [20, 1400])
def test_of_a_large_step_a_part_stands_for_all(third: int) -> None:
    """A third is there, 40 tokens a group; one fills all places for 0.9 s, 20 a group; then the last takes 1.9 s."""
    fleet = Fleet([20] * third + [10] * third + [20] * third, workers=third // 20, slots=2 * 20)
    done, begun, waits = np.split(np.arange(3 * third * GROUP), 3)
    names = [worker.name for worker in fleet.remote]
    for part, tokens in ((done, 19), (begun, 1)):
        for name, rows in zip(names, np.split(part, len(names)), strict=True):
            fleet.hand_out(name, rows.tolist(), tokens=tokens)
            if part is done:
                fleet.end(name, rows.tolist())
    fleet.hand_out("local", waits.tolist(), tokens=1)
    enough_s = 2.8 / (60 * third)
    assert fleet.says(0.97 * enough_s) is False
    assert fleet.says(1.03 * enough_s) is True


def test_whichever_half_of_a_large_step_is_missing_is_waited_for() -> None:
    fleet = Fleet([20] * 2800, workers=1, slots=8192)
    rows = np.arange(2800 * GROUP)
    fleet.hand_out("remote-0", rows.tolist(), tokens=1)
    fleet.end("remote-0", rows[rows // GROUP % 2 == 0].tolist())
    enough_s = 1.9 / (1400 * 2 * GROUP)
    assert fleet.says(0.99 * enough_s) is False
    assert fleet.says(1.01 * enough_s) is True


def test_the_last_group_of_a_large_step_is_not_overlooked() -> None:
    fleet = Fleet([20] * 1400, workers=1, slots=4096)
    rows = np.arange(1400 * GROUP)
    fleet.hand_out("remote-0", rows.tolist(), tokens=1)
    fleet.end("remote-0", np.setdiff1d(rows, [2, 3]).tolist())
    enough_s = 1.9 / (1399 * 2 * GROUP)
    assert fleet.says(0.99 * enough_s) is False
    assert fleet.says(1.01 * enough_s) is True


@pytest.mark.parametrize("slots", [75, 99, 155])
def test_a_part_of_a_large_step_waits_as_long_as_all_of_it(slots: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its eighth has 9, 12 and 19 places and a part of one."""
    fleet = Fleet([20] * 800, slots=slots)
    fleet.hand_out("local", range(800 * GROUP))
    waits_s = list[float]()
    for looked_at in (200, 10**9):
        monkeypatch.setattr(seeding_estimate, "_LOOKED_AT", looked_at)
        estimate = SeedingEstimate(fleet.ledger, fleet.ranking, 0.0, 1e-9)
        view = estimate._view(fleet.ledger.batches[0], fleet.remote, 0.0)
        assert view is not None
        assert len(view.queued) <= looked_at
        waits_s.append(hand_over.wait_s(view))
    assert waits_s[0] == pytest.approx(waits_s[1], rel=0.1)


def test_what_is_dropped_takes_no_training() -> None:
    """Of the first group one sample only is trained: 20 tokens instead of 40."""
    fleet = Fleet([20, 30])
    fleet.finish("remote-0", [0, 1], tokens=20)
    fleet.ledger.apply(ev.Dropped(0, np.array([1], np.int32), "no reward"))
    fleet.hand_out("remote-0", [2, 3], tokens=10)
    assert fleet.says(0.099) is False
    assert fleet.says(0.101) is True


class Starved(Fleet):
    """The first group's 40 tokens are there. One worker elsewhere has a place for one sample: six of 10 tokens wait.

    The trainer has been given that group, and takes 4 s for it.
    """

    def __init__(self, **options: bool) -> None:
        super().__init__([20, 10, 10, 10], slots=1, **options)
        self.finish("local", [0, 1], tokens=20)
        self.estimate = SeedingEstimate(self.ledger, self.ranking, 0.0, train_token_s=0.1)
        self.ledger.apply(ev.Granted(0, np.array([0, 1], np.int32)))
        self.estimate.given(40, now=1.0)

    def ran_dry(self, now: float, switch_s: float = 0.0, local: int = 2) -> bool:
        return self.estimate.ran_dry(self.ledger.batches[0], self.remote, local, switch_s, now)


def test_a_trainer_has_run_dry_once_it_has_trained_all_that_it_was_given() -> None:
    fleet = Starved()
    assert fleet.ran_dry(4.9) is False
    assert fleet.ran_dry(5.1) is True
    fleet.estimate.given(10, now=6.0)
    assert fleet.ran_dry(6.9) is False
    assert fleet.ran_dry(7.1) is True


def test_a_trainer_may_take_longer_than_the_mean_before_it_counts_as_dry() -> None:
    """As long as its engines need to wake: else they would generate while the last micro-batch is trained."""
    fleet = Starved()
    assert fleet.ran_dry(5.04, switch_s=0.05) is False
    assert fleet.ran_dry(5.06, switch_s=0.05) is True


def test_what_comes_while_it_trains_is_trained_behind_it() -> None:
    fleet = Starved()
    fleet.estimate.given(10, now=2.0)
    assert fleet.ran_dry(5.9) is False
    assert fleet.ran_dry(6.1) is True


def test_a_step_that_is_opened_anew_is_trained_anew() -> None:
    fleet = Starved()
    fleet.estimate.opened()
    assert fleet.ran_dry(1.1) is True
    fleet.estimate.given(40, now=2.0)
    assert fleet.ran_dry(5.9) is False
    assert fleet.ran_dry(6.1) is True


@pytest.mark.parametrize(
    ("local", "switch_s", "dry"), [(2, 0.66, True), (2, 0.67, False), (1, 0.49, True), (1, 0.51, False)]
)
def test_its_engines_are_to_help_if_that_spares_it_much_more_than_two_changes_take(
    local: int, switch_s: float, dry: bool
) -> None:
    """Alone the other worker needs 6 s for the last of them, with one more 3 s, with two 2 s."""
    fleet = Starved()
    fleet.estimate.train_token_s = 1e-9  # the last group comes when it comes
    assert fleet.ran_dry(5.1 + switch_s, switch_s, local) is dry


def test_of_a_large_step_as_large_a_part_of_the_helpers_stands_for_all(monkeypatch: pytest.MonkeyPatch) -> None:
    fleet = Fleet([20] * 800, slots=80)
    fleet.hand_out("local", range(800 * GROUP))
    spared_s = list[float]()
    for looked_at in (200, 10**9):
        monkeypatch.setattr(seeding_estimate, "_LOOKED_AT", looked_at)
        estimate = SeedingEstimate(fleet.ledger, fleet.ranking, 0.0, 1e-9)
        view = estimate._view(fleet.ledger.batches[0], fleet.remote, 0.0, helpers=3)
        assert view is not None
        helped = replace(view, workers=view.workers + view.helpers)
        spared_s.append(hand_over.wait_s(view) - hand_over.wait_s(helped))
    assert spared_s[0] == pytest.approx(spared_s[1], rel=0.1)


def test_what_is_not_known_wakes_nobody() -> None:
    assert Starved(measured=False).ran_dry(5.1) is False


@pytest.mark.parametrize(("step", "ahead", "waits"), [(1, 1, True), (1, 0, False), (2, 1, False), (2, 2, True)])
def test_samples_of_a_later_step_wait_if_they_may_be_generated_and_nobody_has_them(
    step: int, ahead: int, waits: bool
) -> None:
    fleet = Fleet([20, 30])
    fleet.hand_out("remote-0", range(4), tokens=1)
    estimate = SeedingEstimate(fleet.ledger, fleet.ranking, 0.0, 0.1, max_staleness=ahead)

    def more_waits() -> bool:
        view = estimate._view(fleet.ledger.batches[0], fleet.remote, 0.0)
        assert view is not None
        return view.more_waits

    assert not more_waits()
    for number in range(1, step + 1):
        fleet.issue(number, [20])
        if number < step:
            fleet.hand_out("remote-0", range(GROUP), step=number)
    assert more_waits() is waits
    fleet.hand_out("remote-0", range(GROUP), step=step)
    assert not more_waits()
