"""Episodes of an evaluation in the ledger: what is said in them, and cut from them, counts in no step."""

from __future__ import annotations

import numpy as np
from msgspec.structs import replace

from actors.ledger import events as ev
from actors.protocol.evaluations import evaluation_step
from actors.protocol.tokens import FinishReason
from tests.actors.ledger import episode_events as ee


def test_what_is_cut_from_a_held_out_episode_is_counted_among_no_discarded_tokens() -> None:
    ledger, step, row = ee.episodes(), evaluation_step(0), np.array([0], np.int32)
    ledger.apply(replace(ee.issued(), step=step))
    ledger.apply(replace(ee.a_turn(ledger, 0, "ask", fresh=True), step=step))
    ledger.apply(ev.Assigned.to_one("w", step, ledger.next_assignment, row))
    hand_out = ledger.batches[step].assignment[row].copy()
    count, end = np.array([2], np.int32), np.array([FinishReason.STOP], np.uint8)
    three = np.array([3], np.int32)
    ledger.apply(ev.TokensAppended.one("w", 0, hand_out, three, count, end, ee.ids("a!"), np.zeros(2, np.float32)))
    ledger.apply(ev.EpisodeCut(step, row, np.array([0], np.int32)))
    counters = ledger.counters
    assert (counters.tokens, counters.evaluation_tokens, counters.tokens_discarded) == (0, 2, 0)
