"""What can go wrong with where state lies.

HeadraceError
└── ResidencyError
    ├── NeverFits        configuration: a bundle is larger than the budget; do not retry
    ├── NoRoomToPark     host memory and disk are full: nothing was changed; retry when a job has left, or give more
    ├── NotParkable      our bug: a backend that cannot hand its state over, or a job that was not added
    ├── DirectoryInUse   infrastructure: another life of the service still has the files; retry is safe
    └── MoveStuck        infrastructure: a move was not over in time; end the process, the next one has what was stored

``StateParked`` and ``ParkedStateDamaged`` stand in ``actors/trainer/errors.py``: backends raise them.
"""

from __future__ import annotations

from transport.errors import HeadraceError


class ResidencyError(HeadraceError):
    """Base of the errors of tiers."""


class NeverFits(ResidencyError):
    """A bundle needs more bytes than the service has in all; the message has both numbers."""

    permanent = True


class NoRoomToPark(ResidencyError):
    """Neither the host tier nor the disk has room for what is to be parked. Every bundle is where it was."""


class NotParkable(ResidencyError):
    """A job was named that has no bundle here, or one that cannot be parked. Our bug."""


class DirectoryInUse(ResidencyError):
    """An earlier life of the service has not ended yet and holds the parked files. Retrying is safe."""


class MoveStuck(ResidencyError):
    """A disk or a device did not answer in time: nobody knows what is where any more, and nothing is moved again.

    Whoever owns the service ends its process; the next one gives each job its last stored state.
    """
