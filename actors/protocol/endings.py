"""Names what ended a sample, a name for each reason: in the ledger, in samples.jsonl, in metrics and in warnings."""

from __future__ import annotations

import enum
from typing import Final

from actors.protocol.tokens import FinishReason


class Ending(enum.IntEnum):
    """Codes of a sample's end in the ledger. A response that is no episode has the code of its FinishReason."""

    UNFINISHED = FinishReason.RUNNING
    ENDED = FinishReason.STOP
    """The model has ended its answer; an episode: its environment or agent has ended it behind a whole turn."""
    MAX_TOKENS = FinishReason.LENGTH
    ABORTED = FinishReason.ABORTED
    TURN_TOKENS = 4
    EPISODE_TOKENS = 5
    REQUEST = 6
    """The last turn has reached the limit of its agent's request, or the model's context length."""
    CONTEXT = 7
    """The messages have become longer than the model's context length."""
    MID_TURN = 8
    """Its environment or agent has ended it while the model was speaking."""
    TURNS_MAX = 9
    EPISODE_S = 10

    @property
    def label(self) -> str:
        """The name in files, such as ``turn_tokens``."""
        return self.name.lower()


CUT: Final = (
    Ending.MAX_TOKENS,
    Ending.TURN_TOKENS,
    Ending.EPISODE_TOKENS,
    Ending.REQUEST,
    Ending.CONTEXT,
    Ending.MID_TURN,
)
"""Endings by which the model's answer was cut off."""
OF_EPISODES: Final = (*CUT, Ending.TURNS_MAX, Ending.EPISODE_S)
"""Endings of episodes whose shares a step's row has."""
BOUNDS: Final[dict[str, str]] = {
    "max_tokens": "cut at rollout.max_tokens",
    "turn_tokens": "cut at environment.turn_tokens",
    "episode_tokens": "cut at environment.episode_tokens",
    "request": "cut at the max_tokens of a request, or at the model's context length",
    "context": "ended at the model's context length",
    "mid_turn": "ended by an agent while the model was speaking",
    "turns_max": "ended at environment.turns_max",
    "episode_s": "ended at environment.episode_s",
}
"""Label of an ending → what it did, for people."""


def column(ending: Ending) -> str:
    """The column of metrics.jsonl with the share of a step's episodes that ended so."""
    return f"ended_by_{ending.label}"
