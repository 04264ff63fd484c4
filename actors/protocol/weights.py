"""What the weight server says and hears. Versions are immutable; they are pulled, and never pushed.

trainer ──Publish──▶ weights ──VersionAvailable──▶ scheduler ──PullVersion──▶ worker ──GetChunks, GetSegment──▶ worker
                        ▲──────────GetManifest, GetChunks──────────────────────┤
weights ──Publish, QueryVersions──▶ shares ◀────────────GetChunks──────────────┘

Shares: the parts of a version that the other machines of a trainer hold, each beside a rank there.
"""

from __future__ import annotations

import msgspec
import numpy as np

from actors.core.message import Message, message
from transport.address import ActorAddress


class TensorEntry(msgspec.Struct, frozen=True, array_like=True):
    """Tells where a parameter lies in a version's bytes. ``dtype`` is torch's name (``float32``, ``bfloat16``)."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset_bytes: int
    length_bytes: int


class Manifest(msgspec.Struct, frozen=True):
    """Describes a version, all but its bytes. ``chunk_hashes`` are xxh3-128 of each chunk."""

    job: str
    policy_version: int
    parent: int
    total_bytes: int
    chunk_bytes: int
    chunk_hashes: tuple[bytes, ...]
    tensors: tuple[TensorEntry, ...]
    adapter_of: str = ""
    """Identity of the model whose adapter the version is (``actors/models/adapter.py``); empty: it is a whole model."""
    sources: tuple[str, ...] = ()
    """Who has the chunks of a version that lies on several machines: "" for the weight server, then names of shares.
    Empty: the weight server has all of them, each ``chunk_bytes`` long but for the last."""
    chunk_ends: tuple[int, ...] = ()
    """End of each chunk in bytes, if there are several sources."""
    chunk_sources: tuple[int, ...] = ()
    """Number of each chunk's source, if there are several."""


@message("weights.publish")
class Publish(Message):
    """The trainer has laid a version out in the segment file ``path`` of host ``host``. Idempotent. Reply: Published.

    On success the server owns the segment: it removes the file when the version retires. If the manifest has several
    sources, the server passes this on to the shares before it takes the version, and ``path`` holds the server's part.
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
    """Address of the puller, which passes on what it has of this version; None: it passes nothing on."""
    host: str = ""
    site: str = ""
    """Site of ``host``; see ``segments.own_site``."""
    avoid: ActorAddress | None = None
    """Feed (another puller) that the puller was given before, and that has failed it."""


@message("weights.manifest_reply")
class ManifestReply(Message):
    """Tells how to get a version: on ``host`` map ``path``, elsewhere ask for chunks. No manifest: it is not held."""

    manifest: Manifest | None
    host: str
    path: str
    feed: ActorAddress | None = None
    """Address of the puller to get the chunks from; None: from the server."""
    feed_maps: bool = False
    """Whether ``feed`` is on the puller's machine: wait for it with GetSegment, and map its file."""
    relay: bool = False
    """Whether the puller may name its address in GetManifest, and pass chunks on."""
    delta: bool = False
    """Whether the puller may name, in GetChunks, the version that it holds."""
    sources: tuple[ActorAddress | None, ...] = ()
    """Address of each of the manifest's sources; None: it is gone, and looked for."""


@message("weights.get_segment")
class GetSegment(Message):
    """A puller asks another one on its machine. Reply: SegmentReady, once the version is whole there."""

    job: str
    policy_version: int


@message("weights.segment_ready")
class SegmentReady(Message):
    path: str


@message("weights.segment_damaged")
class SegmentDamaged(Message):
    """A puller tells the server that chunks of this version do not fit their hashes, however often they are fetched."""

    job: str
    policy_version: int


@message("weights.get_chunks")
class GetChunks(Message):
    """A puller opens a credit stream of Chunk on the bulk lane, in the order asked, at the server or another puller."""

    job: str
    policy_version: int
    chunks: np.ndarray  # int32[n]
    base: int = -1
    """Version that the asker holds: chunks may come as weight deltas against it."""


@message("weights.chunk")
class Chunk(Message):
    policy_version: int
    index: int
    data: np.ndarray  # uint8[m]
    base: int = -1
    """Version against which ``data`` is a delta (``actors/weights/delta.py``); -1: it is the chunk itself."""


@message("weights.query_versions")
class QueryVersions(Message):
    """The trainer asks what is held. Reply: Versions. A server that has just started holds none: publish again.

    The weight server asks its shares, too.
    """

    job: str
    suspect: int = -1
    """Version to check first, and to let go if what is held of it does not fit its hashes."""


@message("weights.versions")
class Versions(Message):
    held: tuple[int, ...]
    sent_bytes: int = 0
    """Bytes of chunks that were sent since the server started."""


@message("scheduler.version_available")
class VersionAvailable(Message):
    """The weight server tells the scheduler that all of a version can be pulled from ``weights``."""

    job: str
    policy_version: int
    weights: ActorAddress
    oldest: int = 0
    """Oldest version that can be pulled from there, too."""
