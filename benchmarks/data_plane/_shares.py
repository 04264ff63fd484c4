"""`bench weights --sources N`: a version on one machine against one divided over several, for one puller elsewhere.

    before   the trainer's weight server has all ─▶ puller
    after    the weight server and N - 1 shares, each a process, have a part ─▶ the same puller, from all at once

All processes are on this machine, so the pull is no faster by more network cards here: what falls is what the trainer's
machine has to send.
"""

from __future__ import annotations

from itertools import pairwise
from time import perf_counter
from typing import Any

import msgspec
import numpy as np

from actors.core.ref import ActorRef
from actors.protocol.weights import Publish, Published, QueryVersions, Versions
from actors.roles import RoleArgs
from actors.weights.manifest import cut_for_sources
from actors.weights.segments import SIMULATED_HOST, Host, host_id, read_manifests
from actors.weights.shares import seal, share_name, share_path, write_pieces
from benchmarks._command import Result
from configs.names import rank_of

Bench = Any
"""The Bench of ``weights.py``, which imports this file."""
_PIECES = 32
"""Parts that each machine has of the bytes, as it has some rows of each of many tensors."""


async def before_and_after(bench: Bench, role: RoleArgs, options: Any) -> Result:
    """Bytes that the trainer's machine sends for one pull, and its time, with one source and with several."""
    sources = ["", *(share_name(rank) for rank in range(1, options.sources))]
    for name in sources[1:]:
        await _start_share(bench, msgspec.structs.replace(role, role="rank", name=name, rank=rank_of(name)))
    puller = [await bench.puller("spread", "spread")]
    server = bench.system.ref(bench.server)
    for _ in range(options.rounds + 1):
        for word in ("before", "after"):
            if word == "before":
                await bench.publish()
            else:
                await _publish_divided(bench, server, sources)
            sent = await _sent(server)
            began = perf_counter()
            await bench.pull_there(puller)
            bench.note(f"pull_{word}", perf_counter() - began)
            bench.note(f"sent_{word}", await _sent(server) - sent)
    size = bench.segment.stat().st_size
    for word in ("before", "after"):
        del bench.found[f"pull_{word}"][0]  # for warming up
    sent_by_leader = {word: max(bench.found.pop(f"sent_{word}")) for word in ("before", "after")}
    return {
        "sources": len(sources),
        "bytes_sent_by_leader_before": sent_by_leader["before"],
        "bytes_sent_by_leader_after": sent_by_leader["after"],
        "sent_by_leader": round(sent_by_leader["after"] / size, 3),
        "pull_before_ms": round(1000 * bench.median("pull_before"), 1),
        "pull_after_ms": round(1000 * bench.median("pull_after"), 1),
    }


async def _sent(server: ActorRef) -> int:
    return (await server.ask(QueryVersions(job="bench"), Versions)).sent_bytes


async def _start_share(bench: Bench, args: RoleArgs) -> None:
    """It registers by itself."""
    memory = bench.memory / args.name
    memory.mkdir(exist_ok=True)
    machine = {"machine": args.name, "memory": str(memory)}
    await bench.family.actor("share", {"role": msgspec.to_builtins(args), **machine})


async def _publish_divided(bench: Bench, server: ActorRef, sources: list[str]) -> None:
    """The newest version's bytes once more, as the next version, divided over the sources."""
    segment, manifest = read_manifests(bench.run_dir)[-1]
    data = np.fromfile(segment, np.uint8).data
    bench.version += 1
    newest = bench.segment
    steps = _PIECES * len(sources)
    ranges = [(len(data) * step // steps // 64 * 64, step % len(sources)) for step in range(1, steps)]
    ends, numbers = cut_for_sources([*ranges, (len(data), 0)], manifest.chunk_bytes)
    cuts = [*zip(pairwise((0, *ends)), numbers, strict=True)]
    hashes: dict[tuple[int, int], bytes] = {}
    for number, name in enumerate(sources):
        own = [cut for cut, source in cuts if source == number]
        token = SIMULATED_HOST.set(Host(name, bench.memory / name) if name else None)
        try:
            path = share_path(newest, name)
            write_pieces(path, len(data), ((start, data[start:end]) for start, end in own))
            hashes |= dict(zip(own, seal(path, own), strict=True))
        finally:
            SIMULATED_HOST.reset(token)
    divided = msgspec.structs.replace(
        manifest,
        policy_version=bench.version,
        parent=bench.version - 1,
        chunk_hashes=tuple(hashes[cut] for cut, _ in cuts),
        sources=tuple(sources),
        chunk_ends=ends,
        chunk_sources=numbers,
    )
    await server.ask(Publish(manifest=divided, host=host_id(), path=str(newest)), Published, timeout_s=30.0)
