"""The other processes of `bench weights`: a weight server, and pullers that believe to be elsewhere.

``python -m benchmarks.data_plane._weights`` and

    server ARGS     the job's WeightServer, as its role process hosts it
    share ARGS      another machine's share of each version
    puller ARGS     a WeightClient; on another machine, if ARGS names one
    follower ARGS   a WeightClient that pulls whatever is new of a run, on another machine
    raw ARGS        a DEALER that streams a file's chunks to whoever says "go"

Each prints where it is, then serves until its standard input ends. ARGS are JSON.
"""

from __future__ import annotations

import json
import mmap
import sys
import threading
from pathlib import Path
from typing import Any, Final

import msgspec
import numpy as np
import zmq

from actors.core.actor import Actor, concurrent, handles
from actors.core.errors import AskError
from actors.core.message import Message, message
from actors.host.host_memory import keep_freed_memory
from actors.protocol.services import LookupService, ServiceFound
from actors.protocol.weights import Chunk, GetChunks, GetManifest, ManifestReply, QueryVersions, Versions
from actors.roles import RoleArgs
from actors.rollout.relay import relay_beside
from actors.weights.client import WINDOW_CHUNKS, WeightClient
from actors.weights.errors import WeightsError
from actors.weights.segments import SIMULATED_HOST, Host, host_id
from actors.weights.server import WeightServer
from actors.weights.share import Share
from benchmarks._processes import cpu_s, on_uvloop, until_input_ends
from benchmarks.data_plane import _curve
from benchmarks.data_plane._echo import new_system
from transport.address import ActorAddress, PeerId
from transport.transport import Lane
from transport.zmq.own_keys import own_keys_for

SERVER: Final = "weights"
_LOOK_S: Final = 0.05


@message("bench.pull")
class Pull(Message):
    weights: ActorAddress
    policy_version: int


@message("bench.pulled")
class PullDone(Message):
    seconds: float
    cpu_s: float
    mapped: bool
    bytes: int


@message("bench.take")
class Take(Message):
    """Have a version sent again and again for ``seconds``, and keep none of it."""

    weights: ActorAddress
    policy_version: int
    seconds: float


@message("bench.taken")
class Taken(Message):
    bytes: int
    times: int


class Puller(Actor):
    """Pulls when told, and lets go at once."""

    def __init__(self, job: str) -> None:
        self._job = job

    async def on_start(self) -> None:
        self._client = WeightClient(self.ctx, self._job, self._serve)

    async def _serve(self) -> ActorAddress:
        return await relay_beside(self.ctx, self._client.held)

    async def on_stop(self) -> None:
        self._client.close()

    @handles(Pull)
    async def pull(self, message: Pull) -> PullDone:
        before_s = cpu_s()
        pulled = await self._client.pull(message.weights, message.policy_version)
        done = PullDone(seconds=pulled.seconds, cpu_s=cpu_s() - before_s, mapped=pulled.mapped, bytes=pulled.bytes)
        pulled.close()
        return done

    @handles(Take)
    @concurrent
    async def take(self, message: Take) -> Taken:
        server, until_s, taken = self.ctx.ref(message.weights), self.ctx.now() + message.seconds, 0
        question = GetManifest(job=self._job, policy_version=message.policy_version, host=host_id())
        manifest = (await server.ask(question, ManifestReply)).manifest
        assert manifest is not None, "it was told of before"
        chunks = np.arange(len(manifest.chunk_hashes), dtype=np.int32)
        request = GetChunks(job=self._job, policy_version=manifest.policy_version, chunks=chunks)
        while self.ctx.now() < until_s:
            stream = server.stream(request, Chunk, timeout_s=60.0, credit_items=WINDOW_CHUNKS, lane=Lane.BULK)
            async with stream as sent:
                async for chunk in sent:
                    taken += chunk.data.nbytes
        return Taken(bytes=taken, times=taken // manifest.total_bytes)


class Follower(Actor):
    """Pulls each version of a run as soon as it sees it, for as long as it lives."""

    def __init__(self, job: str, endpoint: str, head: PeerId) -> None:
        self._job = job
        self._scheduler = ActorAddress(f"scheduler.{job}", head, endpoint)

    async def on_start(self) -> None:
        self._client = WeightClient(self.ctx, self._job)
        self.ctx.start_task(self._follow(), "follow")

    async def on_stop(self) -> None:
        self._client.close()

    async def _follow(self) -> None:
        have = -1
        while True:
            try:
                have = await self._pull_after(have)
            except (AskError, WeightsError):  # a server that was killed, a version that was retired: look again
                await self.ctx.sleep(_LOOK_S)

    async def _pull_after(self, have: int) -> int:
        found = await self.ctx.ref(self._scheduler).ask(LookupService(job=self._job, role="weights"), ServiceFound)
        if found.address is not None:
            held = (await self.ctx.ref(found.address).ask(QueryVersions(job=self._job), Versions)).held
            if held and held[-1] > have:
                pulled = await self._client.pull(found.address, held[-1])
                pulled.close()
                return held[-1]
        await self.ctx.sleep(_LOOK_S)
        return have


async def _serve_follower(args: dict[str, Any]) -> None:
    own = own_keys_for(args["endpoint"], None, "nodes")  # as a node beside the head has it
    endpoint = args["endpoint"] if own is None else f"{args['endpoint']}?key={own.public_hex}"
    keys = None if own is None else own.of_head(own.public_hex)
    system = new_system(f"elsewhere.{args['job']}.rollout-follower", cluster=args["cluster"], keys=keys)
    await system.start()
    head = await system.connect(endpoint)
    await system.spawn(args["name"], Follower(args["job"], endpoint, head))
    print("follows", flush=True)
    await until_input_ends()
    await system.stop()


async def _serve(name: str, actor: Actor, args: dict[str, Any]) -> None:
    system = new_system(
        f"elsewhere.{args['job']}.{name}" if name.startswith("rollout-") else name,
        cluster=args.get("cluster", "bench"),
        bulk_sockets=args.get("sockets", 1),
    )
    await system.start()
    await system.spawn(name, actor)
    address = system.address(name)
    print(msgspec.json.encode(address).decode(), flush=True)
    await until_input_ends()
    await system.stop()


def _serve_raw(args: dict[str, Any]) -> None:
    """Each connection gets its share of the chunks of the file that it names, from a thread of its own."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context(io_threads=args["sockets"])

    def stream(socket: zmq.Socket[bytes]) -> None:
        while order := json.loads(socket.recv()):
            with Path(order["path"]).open("rb") as file:
                view = memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
            chunk = order["chunk_bytes"]
            for start in range(order["first"] * chunk, len(view), order["stride"] * chunk):
                socket.send(view[start : start + chunk], copy=False)

    threads: list[threading.Thread] = []
    ports: list[int] = []
    for _ in range(args["sockets"]):
        socket = context.socket(zmq.DEALER)
        socket.setsockopt(zmq.SNDHWM, 8)
        _curve.secure_listener(socket)
        ports.append(socket.bind_to_random_port("tcp://127.0.0.1"))
        threads.append(threading.Thread(target=stream, args=(socket,), daemon=True))
    for thread in threads:
        thread.start()
    print(json.dumps(ports), flush=True)
    sys.stdin.read()


def main(kind: str, args: dict[str, Any]) -> None:
    """Be the process that ``kind`` names."""
    if kind == "raw":
        _serve_raw(args)
        return
    keep_freed_memory(one_arena=False)  # as a rollout process does
    if machine := args.get("machine"):
        SIMULATED_HOST.set(Host(machine, Path(args["memory"])))
    if kind == "server":
        role = msgspec.convert(args["role"], RoleArgs)
        serving = _serve(SERVER, WeightServer(role), args)
    elif kind == "share":
        serving = _serve(args["machine"], Share(msgspec.convert(args["role"], RoleArgs)), args)
    elif kind == "follower":
        serving = _serve_follower(args)
    else:
        serving = _serve(args["name"], Puller(args["job"]), args)  # its file and its relay are named after it
    on_uvloop(serving)


if __name__ == "__main__":
    main(sys.argv[1], json.loads(sys.argv[2]))
