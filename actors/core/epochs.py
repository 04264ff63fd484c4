"""Epochs: whoever commands says in which reign, and the receiver refuses older ones.

Invariants
- The ruling epoch of a guard never goes back.
- A command of a newer epoch is itself the news that the epoch has changed.
"""

from __future__ import annotations

from actors.core.errors import StaleEpoch


class EpochGuard:
    """A receiver of commands keeps one guard per ruler (a job's scheduler, say).

    guard = EpochGuard()
    guard.admit(message.epoch)      # raises StaleEpoch: the asker sees Refused, a tell is dropped and counted
    """

    def __init__(self) -> None:
        self.ruling = 0
        """Newest epoch seen."""

    def is_stale(self, epoch: int) -> bool:
        """Whether a command of ``epoch`` comes too late. Changes nothing."""
        return epoch < self.ruling

    def admit(self, epoch: int) -> bool:
        """Accept a command of ``epoch``; True if it begins a new reign.

        Raises:
            StaleEpoch: a newer epoch has been seen.
        """
        if epoch < self.ruling:
            raise StaleEpoch(epoch, self.ruling)
        began = epoch > self.ruling
        self.ruling = epoch
        return began
