"""Lack of memory that a fault makes up in a trainer's process: the next micro-batch of several samples finds none.

The micro-batch is computed first, so that the gradient sums are void when it fails, as they are in earnest.
"""

from __future__ import annotations

from actors.protocol.training import MicroBatch
from actors.trainer.errors import OutOfMemory

_strikes: list[None] = []
"""An entry for each micro-batch of this process that will fail."""


def strike() -> None:
    """Let one more micro-batch of this process fail."""
    _strikes.append(None)


def check(batch: MicroBatch, *, ranks: int) -> None:
    """Raise OutOfMemory if ``batch`` is to fail; one that cannot be shared out further among ``ranks`` does not."""
    if _strikes and len(batch.lengths) > ranks:
        _strikes.pop()
        raise OutOfMemory("an injected fault leaves no memory")
