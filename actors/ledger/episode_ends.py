"""Says by what an episode has ended, from its row and from the cause that its driver gives.

A row tells which bound cut the model's last turn. That no further turn, token or second was left shows in no row, so
that the driver must have said it.
"""

from __future__ import annotations

from typing import Final

import numpy as np

from actors.ledger.batch import StepBatch
from actors.protocol.endings import Ending
from actors.protocol.marks import turn_starts

_TOLD: Final = {"turns": Ending.TURNS_MAX, "context": Ending.CONTEXT, "time": Ending.EPISODE_S}
"""Cause that a driver tells (``EpisodeEnded.cause``) → ending."""


def episode_end(batch: StepBatch, row: int, cause: str, *, mid_turn: bool) -> Ending:
    """The ending of ``row``, which has its final length; ``mid_turn``: its last turn was not over."""
    if cause in _TOLD:
        return _TOLD[cause]
    if mid_turn:
        return Ending.MID_TURN
    bound = _bound_of_turn(batch, row)
    if bound is None and cause == "tokens":  # the next turn had no room
        said = int(np.count_nonzero(batch.marks(row) >= 0))
        return Ending.MAX_TOKENS if said >= batch.sampling.max_tokens else Ending.EPISODE_TOKENS
    return bound or Ending.ENDED


def _bound_of_turn(batch: StepBatch, row: int) -> Ending | None:
    """The bound that has cut the last turn; None if the model, or a stop string, has ended it."""
    marks, bounds = batch.marks(row), batch.episodes
    (stopped,), _ = batch.ended(np.array([row], np.int32))
    if bounds is None or stopped or not len(marks) or len(marks) < batch.limit[row]:
        return None
    if np.count_nonzero(marks >= 0) >= batch.sampling.max_tokens:
        return Ending.MAX_TOKENS
    if len(marks) >= batch.width:
        return Ending.EPISODE_TOKENS
    of_turn = len(marks) - int(turn_starts(marks)[-1])
    return Ending.TURN_TOKENS if of_turn >= bounds.turn_tokens else Ending.REQUEST
