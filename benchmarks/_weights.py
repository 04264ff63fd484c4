"""The other processes of `bench weights`: a weight server, and pullers that believe to be elsewhere.

    python -m benchmarks._weights server ARGS     the job's WeightServer, as its role process hosts it
    python -m benchmarks._weights puller ARGS     a WeightClient; on another machine, if ARGS names one
    python -m benchmarks._weights raw ARGS        a DEALER that streams a file's chunks to whoever says "go"

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
import structlog
import zmq

from actors.core.actor import Actor, handles
from actors.core.host_memory import keep_freed_memory
from actors.core.message import Message, message
from actors.roles import RoleArgs
from actors.rollout.relay import Relay
from actors.weights.client import WeightClient
from actors.weights.segments import SIMULATED_HOST, Host
from actors.weights.server import WeightServer
from benchmarks._echo import new_system
from benchmarks._processes import cpu_s, on_uvloop, until_input_ends
from transport.address import ActorAddress

SERVER: Final = "weights"


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


class Puller(Actor):
    """Pulls when told, and lets go at once."""

    def __init__(self, job: str) -> None:
        self._job = job

    async def on_start(self) -> None:
        self._client = WeightClient(self.ctx, self._job, self._serve)

    async def _serve(self) -> ActorAddress:
        return (await self.ctx.spawn(f"{self.ctx.self_address.name}-relay", Relay(self._client.shelf))).address

    async def on_stop(self) -> None:
        self._client.close()

    @handles(Pull)
    async def pull(self, message: Pull) -> PullDone:
        before_s = cpu_s()
        pulled = await self._client.pull(message.weights, message.policy_version)
        done = PullDone(seconds=pulled.seconds, cpu_s=cpu_s() - before_s, mapped=pulled.mapped, bytes=pulled.bytes)
        pulled.close()
        return done


async def _serve(name: str, actor_name: str, actor: Actor) -> None:
    system = new_system(name)
    await system.start()
    await system.spawn(actor_name, actor)
    address = system.address(actor_name)
    print(msgspec.json.encode(address).decode(), flush=True)
    await until_input_ends()
    await system.stop()


def _serve_raw(args: dict[str, Any]) -> None:
    """Each connection gets its share of the chunks of the file that it names, from a thread of its own."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()

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
        ports.append(socket.bind_to_random_port("tcp://127.0.0.1"))
        threads.append(threading.Thread(target=stream, args=(socket,), daemon=True))
    for thread in threads:
        thread.start()
    print(json.dumps(ports), flush=True)
    sys.stdin.read()


def main(kind: str, args: dict[str, Any]) -> None:
    """Be the process that ``kind`` names."""
    structlog.configure(logger_factory=structlog.PrintLoggerFactory(sys.stderr))
    if kind == "raw":
        _serve_raw(args)
        return
    keep_freed_memory(one_arena=False)  # as a rollout process does
    if machine := args.get("machine"):
        SIMULATED_HOST.set(Host(machine, Path(args["memory"])))
    if kind == "server":
        role = msgspec.convert(args["role"], RoleArgs)
        serving = _serve(SERVER, SERVER, WeightServer(role))
    else:
        serving = _serve(args["name"], args["name"], Puller(args["job"]))  # its file and its relay are named after it
    on_uvloop(serving)


if __name__ == "__main__":
    main(sys.argv[1], json.loads(sys.argv[2]))
