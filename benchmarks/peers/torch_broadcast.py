"""How long it takes until the new weights of one process are with n others: ours beside what others do, in one run.

    ours          publish ─▶ n pullers on this machine (mapped), on one other machine, on n other machines
    gloo          torch.distributed.broadcast of one flat tensor to n ranks
    checkpoint    safetensors file ─▶ HTTP (sendfile) ─▶ n clients, into memory that is there
    Ray           ray.put ─▶ n actors on this machine that ray.get; with --ray-python only

Every way moves as many bytes of bfloat16, over loopback where there are sockets, one way after the other, so that they
need not all fit into memory; medians. Seconds are from new weights in the trainer's memory until the last
has them; what of it the trainer cannot train in is its stall. Ours is verified, chunk by chunk, the others' is not.
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from time import perf_counter
from typing import Any, Final, Protocol

import msgspec
import numpy as np

from benchmarks._command import Result, show
from benchmarks._jobs import BenchmarkFailed, hardware
from benchmarks._processes import ROOT, on_uvloop, started
from benchmarks.data_plane.tokens import said
from benchmarks.data_plane.weights import DEFAULT_BYTES, Bench, Children, make_model
from benchmarks.peers._vllm_server import free_port

ROUNDS: Final = 3
PULLERS: Final = 4
_OTHER_WAYS: Final = "benchmarks.peers._weights_ways"

Seconds = dict[str, float]
"""``all_s``: until all have it; ``stall_s``: of that, the trainer's."""


def places(pullers: int) -> dict[str, list[str]]:
    """Where ours are: the machine of each puller, empty for the trainer's."""
    return {
        "same_machine": [""] * pullers,
        "one_other_machine": ["other"] * pullers,
        "each_its_machine": [f"machine-{number}" for number in range(pullers)],
    }


async def ours(bench: Bench, machines: list[str], rounds: int) -> list[Seconds]:
    """Rounds of pullers on these machines, who have none of the versions before."""
    with contextlib.ExitStack() as exits:
        family = Children(exits)
        pullers = [await bench.puller(f"at-{i}-{machine}", machine, family) for i, machine in enumerate(machines)]
        found: list[Seconds] = []
        for _ in range(rounds):
            await bench.publish()
            stall_s, began = bench.found["publish_stall"][-1], perf_counter()
            done = await bench.pull_there(pullers)
            pull_s = perf_counter() - began
            if not all(one.mapped or machine for one, machine in zip(done, machines, strict=True)):
                raise BenchmarkFailed("a puller on the trainer's machine did not map")
            found.append({"all_s": stall_s + pull_s, "stall_s": stall_s})
        return found


class Way(Protocol):
    """What others do."""

    async def start(self, exits: contextlib.ExitStack) -> str:
        """Until its processes are ready; they end with ``exits``. The version of what does it."""
        ...

    async def round(self) -> Seconds: ...

    async def end(self) -> None:
        """Raises:
        BenchmarkFailed: what came is not what was sent.
        """
        ...


class Gloo:
    """Ranks of ``torch.distributed``; the first one is the trainer."""

    def __init__(self, python: str, pullers: int, size_bytes: int, rounds: int) -> None:
        rest = (pullers + 1, free_port(), size_bytes, rounds)
        self._commands = [[python, "-m", _OTHER_WAYS, "gloo", rank, *rest] for rank in range(pullers + 1)]

    async def start(self, exits: contextlib.ExitStack) -> str:
        self._ranks = [exits.enter_context(started(command)) for command in self._commands]
        return await said(self._ranks[0])

    async def round(self) -> Seconds:
        took_s = await _asked(self._ranks[:1], "go")
        return {"all_s": took_s, "stall_s": took_s}

    async def end(self) -> None:
        """Raises:
        BenchmarkFailed: not all ranks have what the first one has.
        """
        if (word := await said(self._ranks[0])) != "equal":
            raise BenchmarkFailed(f"after the broadcasts the ranks' weights are {word}")


class Checkpoint:
    """A file that the trainer writes, and clients that fetch it."""

    def __init__(self, path: Path, pullers: int, size_bytes: int) -> None:
        self._path, self._pullers, self._size = path, pullers, size_bytes

    async def start(self, exits: contextlib.ExitStack) -> str:
        way = [sys.executable, "-m", _OTHER_WAYS]
        self._weights = np.ones(self._size // 2, np.uint16)
        server = exits.enter_context(started([*way, "http_server"]))
        place_bytes = self._size + (1 << 20)
        self._clients = [exits.enter_context(started([*way, "http_client", place_bytes])) for _ in range(self._pullers)]
        self._port = await said(server)
        for client in self._clients:
            await said(client)
        return ""

    async def round(self) -> Seconds:
        from safetensors.numpy import save_file

        began = perf_counter()
        save_file({"weights": self._weights}, self._path)
        stall_s = perf_counter() - began
        fetched_s = await _asked(self._clients, f"http://127.0.0.1:{self._port}{self._path}", self._check)
        return {"all_s": stall_s + fetched_s, "stall_s": stall_s}

    async def end(self) -> None:
        """Each round has counted its bytes."""

    def _check(self, said_bytes: str) -> None:
        if int(said_bytes) != self._path.stat().st_size:
            raise BenchmarkFailed(f"a client fetched {said_bytes} bytes of {self._path.stat().st_size}")


class Ray:
    """Ray's object store, driven by a process in Ray's environment."""

    def __init__(self, python: str, pullers: int, size_bytes: int) -> None:
        self._command = [python, ROOT / "benchmarks" / "peers" / "ray_weights.py", pullers, size_bytes]

    async def start(self, exits: contextlib.ExitStack) -> str:
        self._driver = exits.enter_context(started(self._command))
        return await said(self._driver)

    async def end(self) -> None:
        """Each round has looked at the last element."""

    async def round(self) -> Seconds:
        _tell(self._driver, "go")
        found: dict[str, float] = msgspec.json.decode(await said(self._driver))
        return {"all_s": found["put_s"] + found["get_s"], "stall_s": found["put_s"]}


def _tell(process: subprocess.Popen[str], line: str) -> None:
    assert process.stdin is not None
    process.stdin.write(line + "\n")
    process.stdin.flush()


async def _asked(processes: Sequence[subprocess.Popen[str]], line: str, check: Any = None) -> float:
    """Seconds until all have answered."""
    began = perf_counter()
    for process in processes:
        _tell(process, line)
    for process in processes:
        word = await said(process)
        if check is not None:
            check(word)
    return perf_counter() - began


async def _measure(options: argparse.Namespace, scratch: Path) -> Result:
    rounds, pullers = options.rounds + 1, options.pullers  # the first is for warming up
    found: dict[str, list[Seconds]] = {}
    with contextlib.ExitStack() as exits:
        bench = Bench(Children(exits), scratch, scratch / "model")
        await bench.start()
        try:
            await bench.publish()
            size = bench.segment.stat().st_size
            for place, machines in places(pullers).items():
                found[place] = await ours(bench, machines, rounds)
        finally:
            await bench.stop()
    versions = {"torch": await _take_rounds(Gloo(options.python, pullers, size, rounds), "gloo", rounds, found)}
    await _take_rounds(Checkpoint(scratch / "model.safetensors", pullers, size), "checkpoint_http", rounds, found)
    if options.ray_python:
        versions["ray"] = await _take_rounds(Ray(options.ray_python, pullers, size), "ray", rounds, found)
    return {"versions": versions, "bytes": size, "pullers": pullers, **figures(found, size, pullers)}


async def _take_rounds(way: Way, name: str, rounds: int, found: dict[str, list[Seconds]]) -> str:
    """All rounds of another way, whose processes end with them; its version."""
    with contextlib.ExitStack() as exits:
        version = await way.start(exits)
        found[name] = [await way.round() for _ in range(rounds)]
        await way.end()
    return version


def figures(found: dict[str, list[Seconds]], size_bytes: int, pullers: int) -> Result:
    """Medians without the first round, and how many times as long others take as ours.

    Ray stands beside pullers of the same machine, those with sockets beside pullers that have a machine each.
    """
    middle = {
        way: {name: statistics.median(one[name] for one in rounds[1:]) for name in ("all_s", "stall_s")}
        for way, rounds in found.items()
    }
    beside = {"gloo": "each_its_machine", "checkpoint_http": "each_its_machine", "ray": "same_machine"}
    rows = {
        way: {
            "ms": round(seconds["all_s"] * 1000, 1),
            "trainer_stall_ms": round(seconds["stall_s"] * 1000, 1),
            "gb_per_second": round(size_bytes * pullers / seconds["all_s"] / 1e9, 2),
        }
        for way, seconds in middle.items()
    }
    for way, own in beside.items():
        if way in middle:
            rows[way]["times"] = round(middle[way]["all_s"] / middle[own]["all_s"], 2)
            rows[way]["times_stall"] = round(middle[way]["stall_s"] / middle[own]["stall_s"], 2)
    return {"ways": rows}


def main(args: list[str]) -> int:
    """Measure all ways and print."""
    parser = argparse.ArgumentParser(
        prog="benchmarks.peers.torch_broadcast", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--python", default=sys.executable, help="an interpreter that has torch, for gloo")
    parser.add_argument("--ray-python", default="", help="an interpreter that has Ray; without it, no Ray")
    parser.add_argument("--json", action="store_true", help="JSON only on stdout")
    parser.add_argument("--bytes", type=int, default=DEFAULT_BYTES, help="size of the weights")
    parser.add_argument("--pullers", type=int, default=PULLERS)
    parser.add_argument("--rounds", type=int, default=ROUNDS, help="after one for warming up")
    options = parser.parse_args(args)
    machine = hardware()
    with tempfile.TemporaryDirectory(prefix="headrace-bench-") as directory:
        make_model(Path(directory) / "model", options.bytes)
        found = on_uvloop(_measure(options, Path(directory)))
    show({"hardware": machine, **found}, options, _print_table)
    return 0


def _print_table(result: Result) -> None:
    print("{bytes:,} bytes to {pullers} others".format(**result))
    for way, row in result["ways"].items():
        times = f"  {row['times']} times ours" if "times" in row else ""
        print(f"  {way:<20}" + "{ms:>9} ms  {gb_per_second:>6} GB/s  stall {trainer_stall_ms} ms".format(**row) + times)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
