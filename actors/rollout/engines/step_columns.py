"""Collects the rows of one engine step and lays them out as a ``StepOutput``.

Invariants
- One row a request and step, however many tokens it gained; a request that ended without tokens has an empty row.
- The last finish reason of a request wins, so a request that runs and is then aborted ends once.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from actors.protocol.tokens import FinishReason
from actors.rollout.engine import TOP_TOKEN, StepOutput


class StepColumns:
    """Gathers rows until ``take`` returns and forgets them."""

    def __init__(self) -> None:
        self._ended: list[tuple[int, int, int]] = []
        self._parts: list[
            tuple[
                NDArray[np.int64], NDArray[np.int64], NDArray[np.int64], NDArray[np.float32], NDArray[np.uint8],
                NDArray[np.uint8], NDArray[np.void],
            ]
        ] = []  # fmt: skip

    def __bool__(self) -> bool:
        return bool(self._ended or self._parts)

    def end(self, request: int, offset: int, reason: FinishReason) -> None:
        """End ``request`` after ``offset`` response tokens."""
        self._ended.append((request, offset, int(reason)))

    def tokens(
        self,
        requests: NDArray[np.int64],
        offsets: NDArray[np.int64],
        tokens: NDArray[np.int64],
        logprobs: NDArray[np.float32],
        finished: NDArray[np.uint8],
        routes: NDArray[np.uint8] | None = None,
        tops: NDArray[np.void] | None = None,
    ) -> None:
        """Add one token for each of ``requests``; all arrays are [n], but routes [n, bytes], and tops [n, k], with one
        k in a step. ``requests`` and ``offsets`` are copied.
        """
        routes = np.zeros((len(tokens), 0), np.uint8) if routes is None else routes
        tops = np.zeros((len(tokens), 0), TOP_TOKEN) if tops is None else tops
        self._parts.append((requests.copy(), offsets.copy(), tokens, logprobs, finished, routes, tops))

    def take(self, policy_version: int, step_s: float) -> StepOutput:
        """Return all rows so far, and forget them."""
        requests, offsets, tokens, logprobs, finished, routes, tops = self._joined()
        starts = np.flatnonzero(np.diff(requests, prepend=-1)) if len(requests) else np.zeros(0, np.int64)
        ends = np.append(starts, len(requests))[1:]
        last, alone = finished[ends - 1], list[tuple[int, int, int]]()
        for end in self._ended:
            at = np.flatnonzero(requests[starts] == end[0])
            last[at] = end[2]
            alone += [] if len(at) else [end]
        empty = np.array(alone, np.int64).reshape(-1, 3)
        self._ended, self._parts = [], []
        return StepOutput(
            policy_version=policy_version,
            requests=np.concatenate([requests[starts], empty[:, 0]]),
            offsets=np.concatenate([offsets[starts], empty[:, 1]]).astype(np.int32),
            counts=np.concatenate([ends - starts, np.zeros(len(empty), np.int64)]).astype(np.int32),
            finished=np.concatenate([last, empty[:, 2]]).astype(np.uint8),
            tokens=tokens.astype(np.int32),
            logprobs=logprobs.astype(np.float32),
            step_s=step_s,
            routes=routes if routes.size else None,
            tops=tops if tops.size else None,
        )

    def _joined(
        self,
    ) -> tuple[
        NDArray[np.int64], NDArray[np.int64], NDArray[np.int64], NDArray[np.float32], NDArray[np.uint8],
        NDArray[np.uint8], NDArray[np.void],
    ]:  # fmt: skip
        if not self._parts:
            nothing, empty = np.zeros(0, np.int64), np.zeros(0, np.uint8)
            tops = np.zeros((0, 0), TOP_TOKEN)
            return nothing, nothing, nothing, np.zeros(0, np.float32), empty, empty[:, None], tops
        if len(self._parts) == 1:
            return self._parts[0]
        requests, offsets, tokens, logprobs, finished, routes, tops = (
            np.concatenate(column) for column in zip(*self._parts, strict=True)
        )
        order = np.argsort(requests, kind="stable")
        columns = requests[order], offsets[order], tokens[order], logprobs[order], finished[order]
        return *columns, routes[order], tops[order]


def without_requests(output: StepOutput, gone: set[int]) -> StepOutput:
    """``output`` without the rows of the requests in ``gone``."""
    rows = ~np.isin(output.requests, list(gone))
    entries = np.repeat(rows, output.counts)
    return replace(
        output,
        requests=output.requests[rows],
        offsets=output.offsets[rows],
        counts=output.counts[rows],
        finished=output.finished[rows],
        tokens=output.tokens[entries],
        logprobs=output.logprobs[entries],
        routes=None if output.routes is None else output.routes[entries],
        tops=None if output.tops is None else output.tops[entries],
    )
