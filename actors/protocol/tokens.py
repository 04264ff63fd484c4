"""Tokens on their way from a rollout worker to the ledger: a message for each engine step, all samples in two arrays.

worker ──TokenReport──▶ scheduler ──ReportsTaken (``work.py``), of what asked to be confirmed──▶ worker
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from typing import Any, Final

import numpy as np

from actors.core.message import Message, message
from actors.protocol.work import EngineStats


class FinishReason(enum.IntEnum):
    """Names the codes of a sample's end in ``TokenReport.finished``."""

    RUNNING = 0
    STOP = 1
    LENGTH = 2
    ABORTED = 3
    """Handed back unfinished (drain, revoke): it goes on elsewhere from its tokens."""


ROW: Final = np.dtype([("assignment", "<i8"), ("offset", "<i4"), ("count", "<i4"), ("finished", "u1")])
"""Record of a sample that advanced: it owns the next ``count`` tokens of its report; ``finished`` is a FinishReason.

``offset`` is the position of its first token in the response, so a repeat or a gap is seen by the ledger.
"""


TOKEN: Final = np.dtype([("id", "<i4"), ("logprob", "<f4")])


@message("scheduler.token_report")
class TokenReport(Message):
    """Holds all tokens of an engine step, or of several steps of the same samples, as two arrays of records.

    There is a record for each sample that advanced, and one for each token. They travel as bytes, so that a collector
    joins many reports into one without decoding any.
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
    route_bytes: bytes = b""  # uint8[sum(counts), bytes of a token]
    """Experts that predicted each token (``actors/models/routers.py``); empty: not told."""
    confirm: bool = False
    """Whether the worker is to be told when the ledger has this report."""

    @classmethod
    def of(
        cls, assignments: np.ndarray, offsets: np.ndarray, counts: np.ndarray, finished: np.ndarray,
        tokens: np.ndarray, logprobs: np.ndarray, routes: np.ndarray | None = None, **rest: Any,
    ) -> TokenReport:  # fmt: skip
        """Make a report of columns: [n] for rows, [sum(counts)] for tokens, uint8[sum(counts), bytes] for routes."""
        rows, ids = np.empty(len(assignments), ROW), np.empty(len(tokens), TOKEN)
        rows["assignment"], rows["offset"], rows["count"], rows["finished"] = assignments, offsets, counts, finished
        ids["id"], ids["logprob"] = tokens, logprobs
        told = b"" if routes is None else routes.tobytes()
        return cls(row_bytes=rows.tobytes(), token_bytes=ids.tobytes(), route_bytes=told, **rest)

    @property
    def weight(self) -> int:
        """Number of tokens, or of rows if there are more of those."""
        return max(len(self.token_bytes) // TOKEN.itemsize, len(self.row_bytes) // ROW.itemsize)

    @property
    def rows(self) -> np.ndarray:
        """ROW[n], read-only, as are the columns below."""
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

    @property
    def routes(self) -> np.ndarray | None:
        """uint8[sum(counts), bytes]; None: not told.

        Raises:
            ValueError: the bytes do not share out among the tokens.
        """
        tokens = len(self.token_bytes) // TOKEN.itemsize
        return np.frombuffer(self.route_bytes, np.uint8).reshape(tokens, -1) if self.route_bytes else None


def joined_routes(parts: Sequence[np.ndarray | None], counts: Sequence[int]) -> np.ndarray | None:
    """The routes of several runs of ``counts`` tokens, end to end; 0 (not known) where a part is None. None: all are.

    Raises:
        ValueError: tokens of different parts have routes of different sizes.
    """
    told = [part for part in parts if part is not None and len(part)]
    if not told:
        return None
    width = told[0].shape[1]
    blanks = (np.zeros((count, width), np.uint8) for count in counts)
    return np.concatenate(
        [blank if part is None or not len(part) else part for part, blank in zip(parts, blanks, strict=True)]
    )
