"""Episodes in the ledger: turns, cuts, ends, and the deaths between them."""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import numpy as np
import pytest

from actors.ledger import events as ev
from actors.ledger.batch import SampleState
from actors.ledger.committed import committed_rows
from actors.ledger.errors import IllegalTransition
from actors.ledger.ledger import Ledger
from actors.protocol.episodes import EpisodeLimits
from actors.protocol.marks import RowContext, contexts, turn_starts, whole_turns
from actors.protocol.tokens import FinishReason
from tests.actors.ledger import episode_events as ee

S = SampleState
ROWS = np.arange(4, dtype=np.int32)


def state(ledger: Ledger, row: int = 0) -> SampleState:
    return SampleState(int(ledger.batches[0].state[row]))


def test_an_episode_waits_for_its_environment_before_and_between_the_turns_of_the_model() -> None:
    ledger = ee.episodes()
    assert state(ledger) is S.WAITING and ledger.batches[0].generating
    assert ee.turned(ledger, 0, "ask", fresh=True).queued[0].tolist() == [0] and state(ledger) is S.QUEUED
    outcome = ee.say(ledger, 0, "ab!")
    assert outcome.waiting[0].tolist() == [0] and not outcome.finished and state(ledger) is S.WAITING
    ee.turned(ledger, 0, "go")
    ee.say(ledger, 0, "cd", FinishReason.LENGTH, version=1)
    ee.turned(ledger, 0, "new", fresh=True)
    ee.say(ledger, 0, "e!", version=1)
    assert ee.text_of(ledger, 0) == "|askAB!goCD|newE!" and ledger.counters.tokens == 7
    assert ledger.batches[0].turns[0] == 3 and ledger.counters.samples_migrated == 0
    assert ledger.batches[0].marks(0).tolist() == [-2, -1, -1, 0, 0, 0, -1, -1, 1, 1, -2, -1, -1, 1, 1]
    ledger.apply(ee.ended(0, reward=0.25))
    assert state(ledger) is S.SCORED and ledger.batches[0].reward[0] == 0.25
    assert ledger.counters.tokens_discarded == 0


def test_a_turn_whose_worker_dies_goes_on_from_its_tokens_and_one_that_had_ended_is_not_handed_out_again() -> None:
    ledger = ee.episodes()
    for row, said in enumerate(("ab", "a!", "abcd")):
        ee.turned(ledger, row, "x", fresh=True)
        ee.assign(ledger, row)
        ee.report(ledger, row, said)
    outcome = ledger.apply(ev.Returned("w", ledger.in_flight("w"), "killed"))
    assert outcome.queued[0].tolist() == [0] and sorted(outcome.waiting[0].tolist()) == [1, 2]
    assert ledger.batches[0].finish[1:3].tolist() == [FinishReason.STOP, FinishReason.LENGTH]
    ee.say(ledger, 0, "c!", worker="v")
    assert ee.text_of(ledger, 0) == "|xABC!" and ledger.counters.samples_migrated == 1


def test_a_stop_token_that_the_environment_wrote_ends_no_turn() -> None:
    ledger = ee.episodes()
    ee.turned(ledger, 0, "hi!", fresh=True)
    ee.assign(ledger, 0)
    outcome = ledger.apply(ev.Returned("w", ledger.in_flight("w"), "killed"))
    assert outcome.queued[0].tolist() == [0] and not outcome.waiting


def test_a_turn_says_no_more_than_it_may() -> None:
    ledger = ee.episodes()
    ee.turned(ledger, 0, "x", fresh=True, most=2)
    ee.assign(ledger, 0)
    assert ee.report(ledger, 0, "abc").broken and ledger.counters.gap_rows == 1
    ee.report(ledger, 0, "ab", FinishReason.LENGTH)
    assert ee.text_of(ledger, 0) == "|xAB"


def test_the_newest_version_is_that_of_the_model_s_newest_token_and_not_of_the_last_token() -> None:
    ledger = ee.episodes()
    batch = ledger.batches[0]
    assert batch.newest_version(ROWS) == -1
    ee.turned(ledger, 0, "x", fresh=True)
    assert batch.newest_versions(ROWS).tolist() == [-1] * 4
    ee.say(ledger, 0, "a!", version=3)
    ee.turned(ledger, 0, "y")
    assert batch.newest_versions(ROWS).tolist() == [3, -1, -1, -1] and batch.newest_version(ROWS) == 3


def test_another_life_of_the_environment_leaves_the_row_and_the_turn_under_way_as_they_are() -> None:
    ledger = ee.episodes()
    ledger.apply(ev.EpisodesBegun(0, ROWS))
    ee.turned(ledger, 0, "x", fresh=True)
    ee.assign(ledger, 0)
    ee.report(ledger, 0, "ab")
    ledger.apply(ev.EpisodesBegun(0, ROWS[:1]))
    assert ledger.batches[0].lives.tolist() == [2, 1, 1, 1] and state(ledger) is S.STREAMING
    ee.report(ledger, 0, "!", FinishReason.STOP)
    assert ee.text_of(ledger, 0) == "|xAB!"


def two_turns() -> Ledger:
    ledger = ee.episodes()
    ee.turned(ledger, 0, "x", fresh=True)
    ee.say(ledger, 0, "ab!")
    ee.turned(ledger, 0, "y")
    ee.say(ledger, 0, "cd!")
    return ledger


@pytest.mark.parametrize(("length", "left", "discarded", "turns"), [(8, "|xAB!yCD!", 0, 2), (7, "|xAB!yCD", 1, 2),
    (5, "|xAB!y", 3, 1), (4, "|xAB!", 3, 1), (2, "|xA", 5, 1), (0, "", 6, 0)])  # fmt: skip
def test_a_cut_counts_what_the_model_had_said_and_the_episode_goes_on(
    length: int, left: str, discarded: int, turns: int
) -> None:
    ledger = two_turns()
    assert ledger.apply(ee.cut(0, length)).waiting[0].tolist() == [0]
    assert ee.text_of(ledger, 0) == left and ledger.counters.tokens_discarded == discarded
    assert ledger.batches[0].turns[0] == turns and ledger.counters.tokens == 6
    ee.turned(ledger, 0, "z", fresh=not length)
    ee.say(ledger, 0, "e!")
    assert ee.text_of(ledger, 0) == left + ("|" if not length else "") + "zE!"


def test_a_cut_of_a_turn_under_way_ends_its_hand_out_and_names_whom_to_stop() -> None:
    ledger = two_turns()
    ee.turned(ledger, 0, "z")
    ee.assign(ledger, 0)
    ee.report(ledger, 0, "e")
    held = ledger.in_flight("w")
    outcome = ledger.apply(ee.cut(0, 4))
    assert outcome.broken["w"].tolist() == held.tolist() and outcome.ended == {"w": 1}
    assert state(ledger) is S.WAITING and not len(ledger.in_flight("w")) and ledger.counters.tokens_discarded == 4
    assert ee.text_of(ledger, 0) == "|xAB!"


def streaming(ledger: Ledger) -> None:
    ee.turned(ledger, 0, "z")
    ee.assign(ledger, 0)
    ee.report(ledger, 0, "e")


def assigned(ledger: Ledger) -> None:
    ee.turned(ledger, 0, "z")
    ee.assign(ledger, 0)


def moved(ledger: Ledger) -> None:
    streaming(ledger)
    ledger.apply(ev.Returned("w", ledger.in_flight("w"), "killed"))


@pytest.mark.parametrize(("what", "discarded"), [(streaming, 1), (assigned, 0), (moved, 1)])
def test_an_episode_that_ends_in_a_turn_keeps_its_whole_turns(what: Callable[[Ledger], None], discarded: int) -> None:
    ledger = two_turns()
    what(ledger)
    ledger.apply(ee.ended(0))
    assert ee.text_of(ledger, 0) == "|xAB!yCD!" and ledger.counters.tokens_discarded == discarded
    assert state(ledger) is S.SCORED and not len(ledger.in_flight("w")) and ledger.batches[0].turns[0] == 2


def test_an_episode_that_ends_before_its_first_turn_is_empty_and_scored() -> None:
    ledger = ee.episodes()
    ee.turned(ledger, 0, "x", fresh=True)
    ledger.apply(ee.ended(0, 1, reward=0.0))
    assert ee.text_of(ledger, 0) == ee.text_of(ledger, 1) == "" and state(ledger, 1) is S.SCORED


def test_a_dropped_episode_stops_the_turn_under_way() -> None:
    ledger = two_turns()
    streaming(ledger)
    held = ledger.in_flight("w").tolist()
    outcome = ledger.apply(ev.Dropped(0, ROWS[:1], "no_result"))
    assert outcome.broken["w"].tolist() == held and outcome.ended == {"w": 1} and state(ledger) is S.DROPPED


def turn_with(**changes: int) -> Callable[[Ledger], ev.Turned]:
    def make(ledger: Ledger) -> ev.Turned:
        columns = {name: np.array([value], np.int32) for name, value in changes.items()}
        return msgspec.structs.replace(ee.a_turn(ledger, 0, "zz"), **columns)

    return make


@pytest.mark.parametrize(
    ("event", "why"),
    [
        (turn_with(rows=9), "outside"),
        (turn_with(offsets=7), "begins at 7, and its episode ends at 8"),
        (turn_with(counts=1), "1 tokens are told, 2 come"),
        (turn_with(counts=0), "columns that do not fit"),
        (turn_with(limits=10), "beyond"),
        (turn_with(limits=13), "beyond"),
        (lambda ledger: ee.a_turn(ledger, 1, "zz"), "first context of an episode is a fresh one"),
        (lambda _: ee.cut(0, 9), "cannot be cut to more than it has"),
        (lambda _: ee.cut(0, -1), "cannot be cut"),
        (lambda _: ee.ended(0, reward=float("nan")), "finite"),
        (lambda _: ee.ended(0, 0), "named twice"),
        (lambda _: ev.Scored(0, ROWS, np.ones(4)), "waiting, not finished"),
        (lambda _: ev.Assigned.to_one("w", 0, 1 << 40, ROWS), "waiting, not queued"),
        (lambda _: ev.EpisodesBegun(3, ROWS), "no batch"),
    ],
)  # fmt: skip
def test_what_does_not_fit_an_episode_is_refused_and_changes_nothing(
    event: Callable[[Ledger], ev.Event], why: str
) -> None:
    ledger = two_turns()
    before = ee.text_of(ledger, 0), ledger.count_states(), ledger.batches[0].turns.tolist()
    with pytest.raises(IllegalTransition, match=why):
        ledger.apply(event(ledger))
    assert before == (ee.text_of(ledger, 0), ledger.count_states(), ledger.batches[0].turns.tolist())


def test_an_episode_has_no_more_turns_and_no_more_tokens_of_the_model_than_its_batch_allows() -> None:
    ledger = two_turns()
    with pytest.raises(IllegalTransition, match="beyond"):
        ee.turned(ledger, 0, "z", most=3)  # 6 of 8 tokens are said
    ee.turned(ledger, 0, "z", most=2)
    ee.say(ledger, 0, "!")
    with pytest.raises(IllegalTransition, match="turns_max=3"):
        ee.turned(ledger, 0, "z", most=1)


def test_an_ended_episode_takes_no_more_and_one_that_is_none_takes_no_turn() -> None:
    ledger = two_turns()
    ledger.apply(ee.ended(0))
    for event in (ee.a_turn(ledger, 0, "z"), ee.cut(0, 0), ee.ended(0), ev.EpisodesBegun(0, ROWS[:1])):
        with pytest.raises(IllegalTransition, match="scored"):
            ledger.apply(event)
    plain = Ledger()
    plain.apply(ev.Opened(1))
    none = np.zeros(0, np.int32)
    plain.apply(ev.BatchIssued(0, 1, ee.SAMPLING, np.arange(1), np.zeros(1, np.int32), none, [b""]))
    for event in (ee.a_turn(plain, 0, "z", fresh=True), ee.cut(0, 0), ee.ended(0), ev.EpisodesBegun(0, ROWS[:1])):
        with pytest.raises(IllegalTransition, match="no episodes"):
            plain.apply(event)


def test_a_batch_of_episodes_with_prompts_or_without_room_is_refused() -> None:
    ledger = Ledger()
    ledger.apply(ev.Opened(1))
    with pytest.raises(IllegalTransition, match="empty prompts"):
        one = np.ones(1, np.int32)
        ledger.apply(ev.BatchIssued(0, 1, ee.SAMPLING, np.arange(1), one, one, [b""], ee.LIMITS))
    with pytest.raises(IllegalTransition, match="no turn"):
        ledger.apply(ee.issued(limits=EpisodeLimits(0, 4, 24)))


def test_tokens_of_no_version_are_refused_since_marks_say_who_has_written_a_token() -> None:
    ledger = ee.episodes()
    ee.turned(ledger, 0, "x", fresh=True)
    ee.assign(ledger, 0)
    with pytest.raises(IllegalTransition, match="version -1"):
        ee.report(ledger, 0, "a", version=-1)
    assert ee.report(ledger, 0, "", FinishReason.ABORTED, version=-1).queued, "handed back before any was loaded"


def test_after_the_death_of_the_head_an_episode_waits_or_is_queued_as_its_tokens_say() -> None:
    ledger = two_turns()
    streaming(ledger)
    ee.turned(ledger, 1, "x", fresh=True)
    ee.assign(ledger, 1)
    ee.report(ledger, 1, "a!")
    outcome = ledger.apply(ev.Opened(2))
    assert outcome.queued[0].tolist() == [0] and outcome.waiting[0].tolist() == [1]
    ee.turned(ledger, 1, "y")
    assert ledger.formerly_with({"w"}, 0).tolist() == [0], "its turn is a new one, which w has not"


def test_a_committed_episode_is_put_down_with_the_versions_of_the_model() -> None:
    ledger = ee.episodes()
    ee.turned(ledger, 0, "x", fresh=True)
    ee.say(ledger, 0, "a!", version=2)
    ee.turned(ledger, 0, "y")
    ee.say(ledger, 0, "b!", version=4)
    ledger.apply(ee.ended(0, 1, 2, 3))
    ledger.apply(ev.Granted(0, ROWS))
    ledger.apply(ev.Committed(0, np.array([0, 0, 1, 1]), np.array([0, 1, 0, 1], np.int32), 5))
    first, empty, *_ = committed_rows("j", ledger.batches[0])
    assert (first.first_version, first.last_version, first.n_tokens) == (2, 4, 6)
    assert (empty.first_version, empty.last_version, empty.n_tokens) == (None, None, 0)
    assert ee.text_of(ledger, 0) == "|xA!yB!", "the archive keeps the marks"


def test_turns_and_contexts_are_found_by_their_marks() -> None:
    marks = np.array([-2, -1, 0, 0, -1, 1, -2, 1, 1])
    assert turn_starts(marks).tolist() == [2, 5, 7] and not len(turn_starts(marks[:0]))
    assert whole_turns(marks, under_way=False) == 9 and whole_turns(marks, under_way=True) == 6
    assert whole_turns(marks[:7], under_way=True) == 6 and whole_turns(marks[:2], under_way=False) == 0
    assert whole_turns(marks[:0], under_way=True) == 0
    assert contexts(marks) == [RowContext(0, 2, 6), RowContext(6, 7, 9)] and not contexts(marks[:0])
    assert contexts(marks[:7]) == [RowContext(0, 2, 6), RowContext(6, 7, 7)]
    assert contexts(np.array([-2, -2, 4])) == [RowContext(0, 1, 1), RowContext(1, 2, 3)]


def test_events_of_a_step_that_has_been_pruned_are_passed_over() -> None:
    ledger = Ledger(floor=5)
    source = two_turns()
    for event in (ee.a_turn(source, 0, "z"), ee.cut(0, 0), ee.ended(0), ev.EpisodesBegun(0, ROWS)):
        outcome = ledger.apply(event)
        assert not outcome.queued and not outcome.waiting
    assert ledger.counters.tokens_discarded == 0
