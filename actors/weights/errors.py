"""What can go wrong with weights.

HeadraceError
└── WeightsError
    ├── VersionNotHeld     infrastructure: the server retired or never had it; ask for the newest and retry
    ├── CorruptSegment     infrastructure: bytes do not match their hash; the bad chunks are fetched again
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


class MalformedManifest(WeightsError):
    """Tensors overlap, leave the segment, or the chunk count does not fit the size."""
