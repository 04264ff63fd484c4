"""What the weight server says and hears. Versions are immutable; workers pull, nobody pushes.

trainer ──Publish──▶ weights ──VersionAvailable──▶ scheduler ──PullVersion──▶ worker ──GetChunks, GetSegment──▶ worker
                        ▲──────────GetManifest, GetChunks──────────────────────┘
"""

from __future__ import annotations

import msgspec
import numpy as np

from actors.core.message import Message, message
from transport.address import ActorAddress


class TensorEntry(msgspec.Struct, frozen=True, array_like=True):
    """Where one parameter lies in the version's byte range. ``dtype`` is torch's name (``float32``, ``bfloat16``)."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset_bytes: int
    length_bytes: int


class Manifest(msgspec.Struct, frozen=True):
    """All there is to know about a version before its bytes. ``chunk_hashes`` are xxh3-128 of each chunk."""

    job: str
    policy_version: int
    parent: int
    total_bytes: int
    chunk_bytes: int
    chunk_hashes: tuple[bytes, ...]
    tensors: tuple[TensorEntry, ...]


@message("weights.publish")
class Publish(Message):
    """The trainer has laid a version out in the segment file ``path`` of host ``host``. Idempotent. Reply: Published.

    On success the server owns the segment: it removes the file when the version retires.
    """

    manifest: Manifest
    host: str
    path: str


@message("weights.published")
class Published(Message):
    policy_version: int
    newest: int


@message("weights.get_manifest")
class GetManifest(Message):
    """Reply: ManifestReply. ``policy_version`` -1 asks for the newest."""

    job: str
    policy_version: int
    puller: ActorAddress | None = None
    """Serves, on ``host``, what it has of this version; None: it passes nothing on."""
    host: str = ""
    site: str = ""
    """Of ``host``; see ``segments.own_site``."""
    avoid: ActorAddress | None = None
    """The feed that it was given before, and that has failed it."""


@message("weights.manifest_reply")
class ManifestReply(Message):
    """``path`` can be mapped by a puller on ``host``; others ask for chunks. None: that version is not held."""

    manifest: Manifest | None
    host: str
    path: str
    feed: ActorAddress | None = None
    """Where to get the chunks; None: here."""
    feed_maps: bool = False
    """``feed`` is on the puller's machine: wait for it with GetSegment, and map its file."""
    relay: bool = False
    """Say who you are, and pass on what you have."""
    delta: bool = False
    """Name the version that you hold in GetChunks."""


@message("weights.get_segment")
class GetSegment(Message):
    """Puller to puller on one machine. Reply: SegmentReady, once the version is whole there."""

    job: str
    policy_version: int


@message("weights.segment_ready")
class SegmentReady(Message):
    path: str


@message("weights.segment_damaged")
class SegmentDamaged(Message):
    """Tell, puller to server: chunks of this version do not fit their hashes, however often they are fetched."""

    job: str
    policy_version: int


@message("weights.get_chunks")
class GetChunks(Message):
    """Opens a credit stream of Chunk on the bulk lane, in the order asked. Asked of the server, or of a puller."""

    job: str
    policy_version: int
    chunks: np.ndarray  # int32[n]
    base: int = -1
    """A version that the asker holds: chunks may come as deltas against it."""


@message("weights.chunk")
class Chunk(Message):
    policy_version: int
    index: int
    data: np.ndarray  # uint8[m]
    base: int = -1
    """-1: ``data`` is the chunk itself; else its delta against that version (``actors/weights/delta.py``)."""


@message("weights.query_versions")
class QueryVersions(Message):
    """Reply: Versions. A server that has just started holds none; the trainer publishes again."""

    job: str


@message("weights.versions")
class Versions(Message):
    held: tuple[int, ...]
    sent_bytes: int = 0
    """Of chunks, since the server started."""
