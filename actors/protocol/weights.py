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
    """It says where a parameter lies in the version's bytes. ``dtype`` is torch's name (``float32``, ``bfloat16``)."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset_bytes: int
    length_bytes: int


class Manifest(msgspec.Struct, frozen=True):
    """It says all there is to know about a version before its bytes. ``chunk_hashes`` are xxh3-128 of each chunk."""

    job: str
    policy_version: int
    parent: int
    total_bytes: int
    chunk_bytes: int
    chunk_hashes: tuple[bytes, ...]
    tensors: tuple[TensorEntry, ...]
    adapter_of: str = ""
    """Identity of the model beside which the version is an adapter (``actors/host/adapter.py``); empty: it is a whole
    model."""


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
    """A puller asks about a version, -1 for the newest. Reply: ManifestReply."""

    job: str
    policy_version: int
    puller: ActorAddress | None = None
    """Address that serves, on ``host``, what it has of this version; None: it passes nothing on."""
    host: str = ""
    site: str = ""
    """Site of ``host``; see ``segments.own_site``."""
    avoid: ActorAddress | None = None
    """Feed that it was given before, and that has failed it."""


@message("weights.manifest_reply")
class ManifestReply(Message):
    """A puller on ``host`` can map ``path``; others ask for chunks. Without a manifest that version is not held."""

    manifest: Manifest | None
    host: str
    path: str
    feed: ActorAddress | None = None
    """Address to get the chunks from; None: here."""
    feed_maps: bool = False
    """Whether ``feed`` is on the puller's machine: wait for it with GetSegment, and map its file."""
    relay: bool = False
    """Whether the puller may say who it is, and pass on what it has."""
    delta: bool = False
    """Whether the puller may name the version that it holds in GetChunks."""


@message("weights.get_segment")
class GetSegment(Message):
    """A puller asks one on its machine. Reply: SegmentReady, once the version is whole there."""

    job: str
    policy_version: int


@message("weights.segment_ready")
class SegmentReady(Message):
    path: str


@message("weights.segment_damaged")
class SegmentDamaged(Message):
    """A puller tells the server: chunks of this version do not fit their hashes, however often they are fetched."""

    job: str
    policy_version: int


@message("weights.get_chunks")
class GetChunks(Message):
    """It opens a credit stream of Chunk on the bulk lane, in the order asked, from the server or from a puller."""

    job: str
    policy_version: int
    chunks: np.ndarray  # int32[n]
    base: int = -1
    """Version that the asker holds: chunks may come as deltas against it."""


@message("weights.chunk")
class Chunk(Message):
    policy_version: int
    index: int
    data: np.ndarray  # uint8[m]
    base: int = -1
    """Version against which ``data`` is a delta (``actors/weights/delta.py``); -1: it is the chunk itself."""


@message("weights.query_versions")
class QueryVersions(Message):
    """Somebody asks for Versions. A server that has just started holds none; the trainer publishes again."""

    job: str


@message("weights.versions")
class Versions(Message):
    held: tuple[int, ...]
    sent_bytes: int = 0
    """Bytes of chunks that were sent since the server started."""


@message("scheduler.version_available")
class VersionAvailable(Message):
    """The weight server tells the scheduler: all of a version is published and can be pulled from ``weights``."""

    job: str
    policy_version: int
    weights: ActorAddress
    oldest: int = 0
    """Oldest version that can be pulled from there, too."""
