"""By what an episode has ended: each reason has its own name."""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import numpy as np
import pytest

from actors.ledger import events as ev
from actors.ledger.committed import committed_rows
from actors.ledger.ledger import Ledger
from actors.protocol.endings import BOUNDS, CUT, OF_EPISODES, Ending
from actors.protocol.tokens import FinishReason
from tests.actors.ledger import episode_events as ee


def stopped(ledger: Ledger) -> None:
    ee.turned(ledger, 0, "x", fresh=True)
    ee.say(ledger, 0, "ab!")


def cut_at_the_turn(ledger: Ledger) -> None:
    ee.turned(ledger, 0, "x", fresh=True)
    ee.say(ledger, 0, "abcd", FinishReason.LENGTH)


def cut_at_the_request(ledger: Ledger) -> None:
    ee.turned(ledger, 0, "x", fresh=True, most=2)
    ee.say(ledger, 0, "ab", FinishReason.LENGTH)


def cut_at_the_row(ledger: Ledger) -> None:
    ee.turned(ledger, 0, "x" * 22, fresh=True)
    ee.say(ledger, 0, "ab", FinishReason.LENGTH)


def all_tokens_said(ledger: Ledger) -> None:
    cut_at_the_turn(ledger)
    ee.turned(ledger, 0, "y")
    ee.say(ledger, 0, "efgh", FinishReason.LENGTH)


def all_tokens_said_with_a_stop(ledger: Ledger) -> None:
    cut_at_the_turn(ledger)
    ee.turned(ledger, 0, "y")
    ee.say(ledger, 0, "efg!")


def cut_at_a_stop_string(ledger: Ledger) -> None:
    cut_at_the_turn(ledger)
    ledger.apply(ee.cut(0, 3))


def speaking(ledger: Ledger) -> None:
    ee.turned(ledger, 0, "x", fresh=True)
    ee.assign(ledger, 0)
    ee.report(ledger, 0, "ab")


@pytest.mark.parametrize(
    ("what", "cause", "ending"),
    [
        (stopped, "ended", Ending.ENDED),
        (cut_at_the_turn, "ended", Ending.TURN_TOKENS),
        (cut_at_the_turn, "tokens", Ending.TURN_TOKENS),
        (cut_at_the_request, "ended", Ending.REQUEST),
        (cut_at_the_row, "ended", Ending.EPISODE_TOKENS),
        (all_tokens_said, "ended", Ending.MAX_TOKENS),
        (all_tokens_said_with_a_stop, "tokens", Ending.MAX_TOKENS),
        (all_tokens_said_with_a_stop, "ended", Ending.ENDED),
        (stopped, "tokens", Ending.EPISODE_TOKENS),
        (cut_at_a_stop_string, "ended", Ending.ENDED),
        (stopped, "turns", Ending.TURNS_MAX),
        (stopped, "context", Ending.CONTEXT),
        (stopped, "time", Ending.EPISODE_S),
        (speaking, "ended", Ending.MID_TURN),
        (speaking, "time", Ending.EPISODE_S),
        (stopped, "some other word", Ending.ENDED),
    ],
)
def test_an_episode_ends_by_what_its_row_or_its_driver_says(
    what: Callable[[Ledger], None], cause: str, ending: Ending
) -> None:
    ledger = ee.episodes()
    what(ledger)
    ledger.apply(msgspec.structs.replace(ee.ended(0), cause=cause, keeps_turn=True))
    assert Ending(int(ledger.batches[0].finish[0])) is ending
    names = {Ending.ENDED: "stop", Ending.MAX_TOKENS: "length"}
    assert committed_rows("j", ledger.batches[0])[0].finish == names.get(ending, ending.label)


def test_what_the_model_has_said_of_a_turn_belongs_to_the_answer_and_the_words_of_an_environment_behind_it_do_not() -> (
    None
):
    spoken, due = ee.episodes(), ee.episodes()
    speaking(spoken)
    stopped(due)
    ee.turned(due, 0, "more")
    for ledger, text in ((spoken, "|xAB"), (due, "|xAB!")):
        ledger.apply(msgspec.structs.replace(ee.ended(0), cause="ended", keeps_turn=True))
        assert ee.text_of(ledger, 0) == text and ledger.counters.tokens_discarded == 0
        assert ledger.batches[0].turns[0] == 1 and not len(ledger.in_flight("w"))


def test_an_end_in_a_journal_of_before_is_folded_as_it_was_then() -> None:
    """Its event has neither a cause nor ``keeps_turn``."""
    ledger = ee.episodes()
    speaking(ledger)
    ledger.apply(ev.EpisodesEnded(0, np.array([0], np.int32), np.array([1.0])))
    assert ee.text_of(ledger, 0) == "" and ledger.counters.tokens_discarded == 2


def test_every_ending_that_is_told_has_words_and_its_code_fits_the_ledger() -> None:
    assert {ending.label for ending in OF_EPISODES} == set(BOUNDS) and set(CUT) <= set(OF_EPISODES)
    assert all(int(reason) == int(Ending(reason)) for reason in FinishReason)
    assert max(Ending) < 256
