"""Engine steps that went on with the same samples, said as one delta instead of many.

    step 7: a b c      one row a sample,        a: 7 8 9
    step 8: a b c  ─▶  its tokens together  ─▶  b: 7 8 9
    step 9: a b c                               c: 7 8 9

A collector that is behind pays for messages and rows more than for tokens: merged, three steps cost it one.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice
from typing import cast

import msgspec
import numpy as np

from actors.core.message import Message
from actors.scheduler.messages import TOKEN, FinishReason, TokenDelta


def going_on(waiting: Sequence[Message], tokens_max: int) -> list[TokenDelta]:
    """The first of ``waiting``, a delta, with all that go on right behind it, up to about ``tokens_max`` tokens.

    A delta goes on if its rows are those of the one before, one token later; none of which had ended. So the latency
    of a step of so many samples remains the mean of theirs.
    """
    alike = _alike(waiting, tokens_max)
    rows = alike[0].rows
    if len(alike) == 1 or (rows["count"] != 1).any() or rows["finished"].any():
        return alike[:1]
    expected = np.tile(rows, (len(alike), 1))
    expected["offset"] += np.arange(len(alike), dtype=np.int32)[:, None]
    said = np.frombuffer(b"".join([delta.row_bytes for delta in alike]), np.uint8).reshape(len(alike), -1)
    breaks = np.flatnonzero((said != expected.view(np.uint8)).any(axis=1))
    if not len(breaks):
        return alike
    at = int(breaks[0])
    return alike[: at + _ends(alike[at], expected[at])]


def merged(steps: Sequence[TokenDelta]) -> TokenDelta:
    """One delta of steps that go on from each other; its ``step_s`` is the sum of theirs."""
    if len(steps) == 1:
        return steps[0]
    rows, newest = steps[0].rows.copy(), steps[-1]
    tokens = np.frombuffer(b"".join([step.token_bytes for step in steps]), TOKEN).reshape(len(steps), len(rows))
    rows["count"], rows["finished"] = len(steps), newest.finished
    return msgspec.structs.replace(
        newest,
        row_bytes=rows.tobytes(),
        token_bytes=tokens.T.tobytes(),
        stats=msgspec.structs.replace(newest.stats, step_s=sum(step.stats.step_s for step in steps)),
    )


def _alike(waiting: Sequence[Message], tokens_max: int) -> list[TokenDelta]:
    """The first deltas of ``waiting`` that have one version, one epoch, and as many rows and tokens each."""
    first = cast("TokenDelta", waiting[0])
    kind, alike = _kind(first), [first]
    for message in islice(waiting, 1, max(1, tokens_max // max(1, first.weight))):
        if not isinstance(message, TokenDelta) or _kind(message) != kind:
            break
        alike.append(message)
    return alike


def _kind(delta: TokenDelta) -> tuple[int, int, int, int]:
    return delta.epoch, delta.policy_version, len(delta.row_bytes), len(delta.token_bytes)


def _ends(delta: TokenDelta, expected: np.ndarray) -> bool:
    """Whether its rows are the expected ones, but for that some end."""
    running = delta.rows.copy()
    running["finished"] = FinishReason.RUNNING
    return running.tobytes() == expected.tobytes()
