"""Tokens on their way from a rollout worker to the ledger: one message an engine step, all samples in two arrays.

worker ──TokenReport──▶ scheduler ──ReportsTaken (``work.py``), of what asked to be confirmed──▶ worker
"""

from __future__ import annotations

import enum
from typing import Any, Final

import numpy as np

from actors.core.message import Message, message
from actors.protocol.work import EngineStats


class FinishReason(enum.IntEnum):
    """It is the code of a sample in ``TokenReport.finished``."""

    RUNNING = 0
    STOP = 1
    LENGTH = 2
    ABORTED = 3
    """Handed back unfinished (drain, revoke); goes on elsewhere from its tokens."""


ROW: Final = np.dtype([("assignment", "<i8"), ("offset", "<i4"), ("count", "<i4"), ("finished", "u1")])
"""Record of a sample that moved: it owns the next ``count`` tokens of its report; ``finished`` is a FinishReason.

``offset`` is the position of its first token in the response, so a repeat or a gap is seen by the ledger.
"""


TOKEN: Final = np.dtype([("id", "<i4"), ("logprob", "<f4")])


@message("scheduler.token_report")
class TokenReport(Message):
    """It holds all tokens of an engine step, or of several that went on with the same samples, as two arrays of
    records.

    One record for each sample that moved, one for each token. They travel as bytes, so that a collector makes one
    report of many by joining bytes, and looks at none of them alone.
    """

    job: str
    worker: str
    term: int
    sequence: int
    """Number of this worker's engine step, from 0."""
    policy_version: int
    row_bytes: bytes  # ROW[n]
    token_bytes: bytes  # TOKEN[sum(counts)]
    stats: EngineStats
    confirm: bool = False
    """Whether its worker is to be told when it has been taken."""

    @classmethod
    def of(
        cls, assignments: np.ndarray, offsets: np.ndarray, counts: np.ndarray, finished: np.ndarray,
        tokens: np.ndarray, logprobs: np.ndarray, **rest: Any,
    ) -> TokenReport:  # fmt: skip
        """A report made of columns: [n] for rows, [sum(counts)] for tokens."""
        rows, ids = np.empty(len(assignments), ROW), np.empty(len(tokens), TOKEN)
        rows["assignment"], rows["offset"], rows["count"], rows["finished"] = assignments, offsets, counts, finished
        ids["id"], ids["logprob"] = tokens, logprobs
        return cls(row_bytes=rows.tobytes(), token_bytes=ids.tobytes(), **rest)

    @property
    def weight(self) -> int:
        """Tokens; a row without tokens counts as one."""
        return max(len(self.token_bytes) // TOKEN.itemsize, len(self.row_bytes) // ROW.itemsize)

    @property
    def rows(self) -> np.ndarray:
        """ROW[n], read-only, as the following columns are."""
        return np.frombuffer(self.row_bytes, ROW)

    @property
    def assignments(self) -> np.ndarray:
        """int64[n]"""
        return self.rows["assignment"]

    @property
    def offsets(self) -> np.ndarray:
        """int32[n]"""
        return self.rows["offset"]

    @property
    def counts(self) -> np.ndarray:
        """int32[n]"""
        return self.rows["count"]

    @property
    def finished(self) -> np.ndarray:
        """uint8[n], FinishReason"""
        return self.rows["finished"]

    @property
    def tokens(self) -> np.ndarray:
        """int32[sum(counts)]"""
        return np.frombuffer(self.token_bytes, TOKEN)["id"]

    @property
    def logprobs(self) -> np.ndarray:
        """float32[sum(counts)]"""
        return np.frombuffer(self.token_bytes, TOKEN)["logprob"]
