"""A version that lies on several machines: each keeps the rows of its own ranks, and nothing travels for it.

    WriteShare   each rank of the first replica writes its rows into its own machine's file
    SealShare    the first rank of each machine hashes what lies there ─▶ the leader puts the manifest together

Which bytes lie where follows from the layout and from the machines of the ranks, so every rank knows it by itself.
"""

from __future__ import annotations

import platform
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import msgspec
from torch import Tensor
from torch.distributed.tensor import DTensor

from actors.host.room import no_space
from actors.protocol.weights import Manifest
from actors.trainer.backends.fsdp.sharded_model import Rows, own_piece, place_of
from actors.trainer.backends.fsdp.world import World
from actors.trainer.backends.torch.flat import bytes_of
from actors.weights.manifest import cut_for_sources
from actors.weights.shares import seal, share_name, share_path, write_pieces


def sources(world: World) -> tuple[str, ...]:
    """Sources of a version, as its manifest names them: a machine each, the leader's first."""
    return "", *(share_name(ranks[0]) for ranks in world.machines[1:])


def write(rows: Rows, world: World, segment: Path) -> None:
    """Write this rank's rows into its machine's share.

    Raises:
        NoSpaceLeft: this machine has no room.
    """
    if world.is_first_replica:
        path = share_path(segment, sources(world)[world.machine])
        what = f"the share of the weights that machine {platform.node()} has"
        try:
            write_pieces(path, rows.total_bytes, _own_bytes(rows, world))
        except OSError as error:
            raise no_space(error, path, what, here_bytes(rows, world)) or error from error


def here_bytes(rows: Rows, world: World) -> int:
    """Bytes of a version that lie on this rank's machine."""
    total = 0
    for (start, end), (entry, (_, own)) in zip(_bounds(rows), rows.with_entries, strict=True):
        for upto, rank in _ranges(own, start, end, entry.length_bytes, world):
            total += (upto - start) * (world.machine_of(rank) == world.machine)
            start = upto  # noqa: PLW2901  where the next rank's rows begin
    return total


def _own_bytes(rows: Rows, world: World) -> Iterator[tuple[int, memoryview]]:
    for (start, end), (entry, (_, own)) in zip(_bounds(rows), rows.with_entries, strict=True):
        if not isinstance(own, DTensor) and world.rank:
            continue  # it is whole on every rank, and the leader's to write
        piece = own_piece(own)
        if piece.rows.numel():
            at = start + piece.first * (entry.length_bytes // max(1, entry.shape[0]))
            yield at, bytes_of(piece.rows.to(rows.dtype).reshape(-1).cpu())
        if world.rank == _ranges(own, start, end, entry.length_bytes, world)[-1][1]:  # what is between tensors is zero
            yield start + entry.length_bytes, memoryview(bytes(end - start - entry.length_bytes))


def seal_share(rows: Rows, world: World, segment: Path, chunk_bytes: int) -> tuple[bytes, ...]:
    """Give this machine's share its final name; returns its hashes, or none if it is another rank's to do."""
    if not world.is_first_replica or world.rank != world.machines[world.machine][0]:
        return ()
    ends, machines = _chunks(rows, world, chunk_bytes)
    bounds = [cut for cut, machine in zip(pairwise((0, *ends)), machines, strict=True) if machine == world.machine]
    return seal(share_path(segment, sources(world)[world.machine]), bounds)


def spread(manifest: Manifest, rows: Rows, world: World, hashes: list[tuple[bytes, ...]]) -> Manifest:
    """The manifest of a version whose shares have these hashes, a tuple for each rank."""
    ends, machines = _chunks(rows, world, manifest.chunk_bytes)
    left = [iter(hashes[ranks[0]]) for ranks in world.machines]
    return msgspec.structs.replace(
        manifest,
        chunk_hashes=tuple(next(left[machine]) for machine in machines),
        sources=sources(world),
        chunk_ends=ends,
        chunk_sources=machines,
    )


def _chunks(rows: Rows, world: World, chunk_bytes: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Ends and machines of the version's chunks."""
    return cut_for_sources(
        (
            (upto, world.machine_of(rank))
            for (start, end), (entry, (_, own)) in zip(_bounds(rows), rows.with_entries, strict=True)
            for upto, rank in _ranges(own, start, end, entry.length_bytes, world)
        ),
        chunk_bytes,
    )


def _bounds(rows: Rows) -> list[tuple[int, int]]:
    """Where each tensor begins in the segment, and where the next one does."""
    return [*pairwise([*(entry.offset_bytes for entry in rows.entries), rows.total_bytes])]


def _ranges(tensor: Tensor, start: int, end: int, length_bytes: int, world: World) -> list[tuple[int, int]]:
    """(end in bytes, rank) of each rank that has rows of a tensor, in order; the last one's range goes to ``end``."""
    found: list[tuple[int, int]] = []
    if isinstance(tensor, DTensor):
        whole = tensor.shape
        row_bytes = length_bytes // max(1, whole[0])
        for rank in range(world.shards):
            shape, first = place_of(tensor, rank)
            if shape.numel():
                found.append((start + (first + shape[0]) * row_bytes, rank))
    return [*found[:-1], (end, found[-1][1] if found else 0)]
