"""Turns of held-out episodes among those of training: who gets a slot where there are too few."""

from __future__ import annotations

import numpy as np
from msgspec.structs import replace

from actors.ledger import events as ev
from actors.protocol.evaluations import evaluation_step
from actors.protocol.tokens import FinishReason
from tests.actors.fleet.test_episode_turns import handed_out
from tests.actors.ledger import episode_events as ee


def test_an_episode_of_an_evaluation_begins_last_but_once_begun_goes_on_first() -> None:
    def told(*, begun: bool) -> list[int]:
        """Steps of what one worker with four slots gets, where five samples wait for it."""
        ledger, evaluation, row = ee.episodes(), evaluation_step(0), np.array([0], np.int32)
        ledger.apply(replace(ee.issued(), step=evaluation))
        ledger.apply(replace(ee.a_turn(ledger, 0, "held out", fresh=True), step=evaluation))
        if begun:
            ledger.apply(ev.Assigned.to_one("w", evaluation, ledger.next_assignment, row))
            hand_out = ledger.batches[evaluation].assignment[row].copy()
            at, one, end = np.array([8], np.int32), np.array([1], np.int32), np.array([FinishReason.STOP], np.uint8)
            said = ev.TokensAppended.one("w", 0, hand_out, at, one, end, ee.ids("!"), np.zeros(1, np.float32))
            ledger.apply(said)
            ledger.apply(ev.Turned(evaluation, row, at + 1, np.zeros(1, np.uint8), one, ee.ids("x"), at + 4))
        for training in range(4):
            ee.turned(ledger, training, "task", fresh=True)
        [work] = handed_out(ledger, {"w": 0}).values()
        return [one.step for one in work]

    assert told(begun=False) == [0, 0, 0, 0]
    assert told(begun=True) == [evaluation_step(0), 0, 0, 0]
