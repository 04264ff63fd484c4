"""Engine steps that went on with the same samples, said as one report instead of many.

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
from actors.protocol.tokens import ROW, TOKEN, FinishReason, TokenReport


def going_on(waiting: Sequence[Message], tokens_max: int) -> list[TokenReport]:
    """The first of ``waiting``, a report, with all that go on right behind it, up to about ``tokens_max`` tokens.

    A report goes on if its rows are those of the one before, each where that one ends; none of which had ended. All
    rows of a report have gained as many tokens, so the latency of a step of so many samples remains the mean of theirs.
    """
    alike = _alike(waiting, tokens_max)
    if len(alike) == 1:
        return alike
    rows = np.frombuffer(b"".join([report.row_bytes for report in alike]), ROW).reshape(len(alike), -1)
    counts = rows["count"][:, :1]
    behind = rows["offset"][0] + np.cumsum(counts, axis=0) - counts
    goes_on = (rows["count"] == counts) & (rows["offset"] == behind) & (rows["assignment"] == rows["assignment"][0])
    goes_on &= counts > 0  # an end without a token keeps its row
    goes_on[1:] &= (rows["finished"] == FinishReason.RUNNING)[:-1]
    breaks = np.flatnonzero(~goes_on.all(axis=1))
    return alike[: max(1, int(breaks[0]))] if len(breaks) else alike


def merged(steps: Sequence[TokenReport]) -> TokenReport:
    """Join the reports of steps that go on from each other; its ``step_s`` is the sum of theirs."""
    if len(steps) == 1:
        return steps[0]
    rows, newest = steps[0].rows.copy(), steps[-1]
    parts = [np.frombuffer(step.token_bytes, TOKEN).reshape(len(rows), -1) for step in steps]
    tokens = np.concatenate(parts, axis=1)
    rows["count"], rows["finished"] = tokens.shape[1], newest.finished
    return msgspec.structs.replace(
        newest,
        row_bytes=rows.tobytes(),
        token_bytes=tokens.tobytes(),
        stats=msgspec.structs.replace(newest.stats, step_s=sum(step.stats.step_s for step in steps)),
    )


def _alike(waiting: Sequence[Message], tokens_max: int) -> list[TokenReport]:
    """The first reports of ``waiting`` that have one version, one term, and as many rows each."""
    first = cast("TokenReport", waiting[0])
    kind, alike, tokens = _kind(first), [first], first.weight
    for message in islice(waiting, 1, None):
        if not isinstance(message, TokenReport) or _kind(message) != kind:
            break
        tokens += message.weight
        if tokens > tokens_max:
            break
        alike.append(message)
    return alike


def _kind(report: TokenReport) -> tuple[int, int, int]:
    return report.term, report.policy_version, len(report.row_bytes)
