"""One puller's copy of a version: it grows chunk by chunk, and each is verified before anybody sees it.

    begin ─▶ <segment>@<holder>.partial ── land, land, … ─▶ whole ─▶ <segment>@<holder> ─▶ release

Invariants
- A chunk leaves ``missing`` only when it is in its place and fits its hash in the manifest.
- The file outlives a holder that was killed: the holder's next life verifies what is there and fetches the rest.
- ``missing`` and ``ended`` change on the event loop; bytes are written by the holder's own thread.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from actors.host.room import no_space, require_size
from actors.protocol.weights import Chunk, Manifest
from actors.weights.delta import apply_delta
from actors.weights.errors import MalformedDelta, NoRoom
from actors.weights.manifest import chunk_bounds, chunk_is_intact
from actors.weights.memory import SegmentWriter, copy, damaged_chunks, map_segment, partial_path


class Holding:
    """Holds one version, whole or partly. ``own``: the file at ``path`` is this holder's, and goes with the version."""

    def __init__(self, manifest: Manifest, path: Path, view: memoryview, missing: set[int], *, own: bool) -> None:
        self.manifest = manifest
        self.path = path
        self.view = view
        self.missing = missing
        self.own = own
        self.named = not own
        """Whether the file has its final name, so that it can be mapped."""
        self.ended = False
        """Whether the version was released, so that nothing more of it will come."""
        self.takes_deltas = True
        """Whether deltas are taken; no longer after a misfit, whose base may be damaged, here or where it was made."""
        self.wire_bytes = 0
        """Bytes that have come over the network for the version."""
        self.deltas: dict[int, Chunk] = {}
        """Chunks that came as deltas, to be passed on as such."""
        self._changed = asyncio.Event()

    @property
    def whole(self) -> bool:
        return not self.missing

    def land(self, chunks: Sequence[Chunk], base: Holding | None) -> list[int]:
        """Put ``chunks`` in their places; returns the numbers of the intact ones. Blocks."""
        landed: list[int] = []
        for chunk in chunks:
            if chunk.data.ndim != 1 or chunk.data.dtype != np.uint8:
                continue  # the wire may bring any array: this one counts as damaged
            start, end = chunk_bounds(self.manifest, chunk.index)
            place = self.view[start:end]
            if chunk.base >= 0:
                right = base is not None and self._apply(chunk, base.view[start:end], place)
            elif right := chunk_is_intact(self.manifest, chunk.index, chunk.data.data):
                copy(chunk.data, place)
            if right:
                landed.append(chunk.index)
        return landed

    def _apply(self, chunk: Chunk, old: memoryview, place: memoryview) -> bool:
        try:
            apply_delta(chunk.data, old, place)
        except MalformedDelta:
            return False
        return chunk_is_intact(self.manifest, chunk.index, place)

    def landed(self, chunks: Sequence[Chunk], right: Sequence[int]) -> None:
        """Note that the chunks ``right`` have come, and wake those who wait for them."""
        self.missing.difference_update(right)
        self.wire_bytes += sum(chunk.data.nbytes for chunk in chunks)
        deltas = {chunk.index: chunk for chunk in chunks if chunk.base >= 0}
        self.takes_deltas = self.takes_deltas and deltas.keys() <= set(right)
        self.deltas.update((index, deltas[index]) for index in right if index in deltas)
        self._wake()

    def has_its_name(self) -> None:
        """Note that the whole version is in the file at ``path``."""
        self.named = True
        self._wake()

    def _wake(self) -> None:
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    def _lacks(self, index: int | None) -> bool:
        return not self.named if index is None else index in self.missing

    async def until(self, index: int | None, timeout_s: float) -> bool:
        """Wait until chunk ``index`` (None: the whole file) is here; False if released or not in time."""
        try:
            async with asyncio.timeout(timeout_s):
                while not self.ended and self._lacks(index):
                    await self._changed.wait()
        except TimeoutError:
            return False
        return not self.ended

    def end(self) -> None:
        """Note that nobody gets the version, or more of it, here any more."""
        self.ended = True
        self._wake()

    def release(self) -> None:
        """End the version, and remove its own file if whole; views that are still held keep their bytes."""
        if not self.ended:
            self.end()
        if self.own and self.whole:
            self.path.unlink(missing_ok=True)

    def discard(self) -> None:
        """Release the version, and remove its file even if unfinished."""
        self.release()
        if self.own:
            partial_path(self.path).unlink(missing_ok=True)


class HeldVersions(dict[int, Holding]):
    """Holds the versions that one puller has from the network: the newest whole one, and the one that is coming."""

    def __init__(self) -> None:
        super().__init__()
        self._coming = -1
        self._changed = asyncio.Event()

    def expect(self, policy_version: int) -> None:
        """Note that ``policy_version`` will come, so that others can wait for it here; -1: nothing will."""
        self._coming = policy_version
        self.notify()

    def notify(self) -> None:
        """Wake those who wait, since a version was added."""
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    async def until(self, policy_version: int, timeout_s: float) -> Holding | None:
        """Wait until the version has begun to come; None if it does not."""
        try:
            async with asyncio.timeout(timeout_s):
                while policy_version not in self and policy_version == self._coming:
                    await self._changed.wait()
        except TimeoutError:
            return None
        return self.get(policy_version)


def open_holding(manifest: Manifest, path: Path, writer: SegmentWriter, *, first: bool) -> Holding:
    """Make room for a version at ``path``, or take over what an earlier life has left there. Blocks.

    ``first``: it is the first of this life, so files that earlier lives left of other versions are removed.

    Raises:
        NoRoom: there is no room now.
        NoSpaceLeft: this machine's shared memory is smaller than a version.
    """
    if first:
        _remove_others(path)
    if (there := mapped_holding(manifest, path, own=True)) is not None:
        return there
    path.unlink(missing_ok=True)
    try:
        memory, resumed = writer.begin(path, manifest.total_bytes)
    except OSError as error:
        what = f"version {manifest.policy_version} of the weights"
        require_size(path, manifest.total_bytes, what)
        full = no_space(error, path, what, manifest.total_bytes)
        raise NoRoom(f"{full or f'{what} at {path}: {error}'}") from error
    view = memoryview(memory)
    missing = damaged_chunks(manifest, view) if resumed else range(len(manifest.chunk_hashes))
    return Holding(manifest, path, view, set(missing), own=True)


def mapped_holding(manifest: Manifest, path: Path, *, own: bool = False, verified: bool = False) -> Holding | None:
    """The version in the file at ``path``, mapped, if all of it is there and intact. Blocks.

    ``own``: an earlier life of ours left it. ``verified``: by its living holder, so neighbours need not hash it again.
    """
    try:
        view = map_segment(path, own=own)
    except (OSError, ValueError):
        return None
    if len(view) != manifest.total_bytes or (not verified and damaged_chunks(manifest, view)):
        return None
    holding = Holding(manifest, path, view, set(), own=own)
    holding.has_its_name()
    return holding


def _remove_others(path: Path) -> None:
    """Remove the other versions of the holder whose file is ``path``."""
    segment, _, holder = path.name.rpartition("@")
    of_run = segment.rpartition("-v")[0]
    for left in path.parent.glob(f"{of_run}-v*@{holder}*"):
        if left.name.removesuffix(".partial").endswith(f"@{holder}") and left not in (path, partial_path(path)):
            left.unlink(missing_ok=True)
