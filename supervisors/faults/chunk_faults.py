"""Flips one bit of a weight chunk in shared memory: in the segment file that workers map and the server reads.

The file is replaced by a copy, never written into: a process that has mapped and verified it keeps the right bytes, and
one that maps it from now on finds a wrong hash. The fault is to prove that wrong weights are never used.
"""

from __future__ import annotations

import os
import random
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from actors.weights.manifest import chunk_bounds
from actors.weights.segments import manifest_path, memory_of, read_manifests, run_id
from configs.fault_plan import ChunkTarget
from supervisors.tree.errors import FaultNotPossible

_INTACT: Final = "intact"
"""The ending of the name under which the intact file is kept until it is put back."""


@dataclass(frozen=True)
class SpoiltChunk:
    """A spoilt chunk: the segment that holds a wrong bit, and the file that was there before."""

    segment: Path
    intact: Path
    inode: int
    """The inode of the spoilt file."""
    version: int
    index: int


def spoil_chunk(run_dir: Path, target: ChunkTarget, rng: random.Random) -> SpoiltChunk:
    """Flip one bit of the chunk that ``target`` names.

    Raises:
        FaultNotPossible: this machine's shared memory does not hold that version, or holds none at all.
    """
    held = {manifest.policy_version: (segment, manifest) for segment, manifest in read_manifests(run_dir)}
    version = max(held, default=-1) if target.version is None else target.version
    if version not in held:
        there = ", ".join(str(v) for v in sorted(held)) or "none"
        wanted = "any version" if target.version is None else f"version {target.version}"
        raise FaultNotPossible(f"no segment of {wanted} lies here; there are: {there}")
    segment, manifest = held[version]
    chunks = len(manifest.chunk_hashes)
    index = rng.randrange(chunks) if target.index is None else target.index % chunks
    start, end = chunk_bounds(manifest, index)
    spoilt, intact = (segment.with_name(f"{segment.name}-{word}") for word in ("spoilt", _INTACT))
    try:
        shutil.copyfile(segment, spoilt)
        _flip_bit(spoilt, rng.randrange(start, end), rng.randrange(8))
        intact.unlink(missing_ok=True)
        os.link(segment, intact)
        spoilt.replace(segment)
    except OSError as error:
        raise FaultNotPossible(f"the segment of version {version} has just been retired: {error}") from error
    return SpoiltChunk(segment, intact, segment.stat().st_ino, version, index)


def mend_chunk(spoilt: SpoiltChunk) -> str:
    """Put the intact file back, unless the version has been retired or published anew; says which."""
    there = spoilt.segment.exists() and spoilt.segment.stat().st_ino == spoilt.inode
    if there and manifest_path(spoilt.segment).exists():
        spoilt.intact.replace(spoilt.segment)
        return "the intact file is back"
    spoilt.intact.unlink(missing_ok=True)
    return "the version had been retired by then"


def mend_all(run_dir: Path) -> int:
    """Put back every intact file of this run whose version is still there; returns how many."""
    mended = 0
    run = run_id(run_dir)
    for intact in memory_of(run).glob(f"headrace-{run}-v*-{_INTACT}"):
        segment = intact.with_name(intact.name.removesuffix(f"-{_INTACT}"))
        there = segment.exists() and manifest_path(segment).exists()
        if there:
            intact.replace(segment)
        else:
            intact.unlink(missing_ok=True)
        mended += there
    return mended


def _flip_bit(path: Path, at: int, bit: int) -> None:
    with path.open("r+b") as file:
        file.seek(at)
        byte = file.read(1)[0]
        file.seek(at)
        file.write(bytes([byte ^ (1 << bit)]))
