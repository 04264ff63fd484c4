"""What can go wrong in a training service besides what its backends raise.

HeadraceError
├── CallOutOfOrder       a bug in the trainer: a call's number is neither the last one nor the next
├── NotYours             a process spoke for another job than its own; refused, and nothing was done
├── NoSlice              the wait reached its limit while others computed; a retry may succeed
└── ResidencyError
    ├── NeverFits        configuration: a bundle is larger than the budget; do not retry
    ├── NoRoomToPark     host memory and disk are full: nothing was changed; retry when a job has left, or give more
    ├── NotParkable      a bug in the service: a backend that cannot hand its state over, or a job that was not added
    ├── DirectoryInUse   infrastructure: another life of the service still has the files; retry is safe
    └── MoveStuck        infrastructure: a move took too long; end the process, the next one has the stored state

``BundleLost`` and ``ServiceRefuses``, which a trainer must know, and ``StateParked`` and ``ParkedStateDamaged``, which
backends raise, are in ``actors/trainer/errors.py``.
"""

from __future__ import annotations

from actors.core.errors import ReplyError
from transport.errors import HeadraceError


class CallOutOfOrder(ReplyError):
    """A call came whose number is neither the last one nor the next. The trainer's bug; nothing was computed."""


class NotYours(ReplyError):
    """A process spoke for a job that it does not serve."""


class NoSlice(HeadraceError):
    """A call waited for its slice as long as it may."""


class ResidencyError(HeadraceError):
    """Base of the errors about the place of trained state."""


class NeverFits(ResidencyError):
    """A bundle needs more bytes than the service has in all; the message has both numbers."""

    permanent = True


class NoRoomToPark(ResidencyError):
    """Neither the host tier nor the disk has room for what is to be parked. Every bundle is where it was."""


class NotParkable(ResidencyError):
    """A job was named that has no bundle here, or one that cannot be parked. A bug in the service."""


class DirectoryInUse(ResidencyError):
    """An earlier life of the service has not ended yet and holds the parked files. Retrying is safe."""


class MoveStuck(ResidencyError):
    """A disk or a device did not answer in time: the place of the state is unknown, and nothing is moved again.

    The service's owner ends its process; the next one gives each job its last stored state.
    """
