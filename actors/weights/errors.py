"""Errors of weights.

HeadraceError
└── WeightsError
    ├── VersionNotHeld     infrastructure: the server retired or never had it; ask for the newest and retry
    ├── CorruptSegment     infrastructure: bytes do not match their hash; the bad chunks are fetched again
    ├── SourceLost         infrastructure: a machine that has a share is gone; retry, or take the next version
    ├── MalformedDelta     infrastructure: a chunk's delta cannot be applied; the chunk is fetched again
    ├── NoRoom             infrastructure: this machine's shared memory is full; retry later
    └── MalformedManifest  bug of the publisher; do not retry
"""

from __future__ import annotations

from transport.errors import HeadraceError


class WeightsError(HeadraceError):
    """A version could not be published or pulled."""


class VersionNotHeld(WeightsError):
    """The server does not hold the version that was asked for. Retry with the newest."""


class CorruptSegment(WeightsError):
    """Bytes differ from their hash in the manifest even after they were fetched again."""


class SourceLost(WeightsError):
    """A machine that has a share of the version is gone. Retry: it may come back, and the next version comes."""


class MalformedManifest(WeightsError):
    """Tensors overlap, leave the segment, or the chunk count does not fit the size."""

    permanent = True


class MalformedDelta(WeightsError):
    """A chunk's delta is malformed, or was made against other bytes. The chunk is fetched again."""


class NoRoom(WeightsError):
    """Shared memory of this machine has no room for a version. Retry when others have released theirs."""
