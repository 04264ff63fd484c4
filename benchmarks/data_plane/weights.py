"""What it costs to hand a version on: published by a real trainer, pulled on the same machine, and over TCP.

    trainer here ─ publish ─▶ shared memory ── map, verify ─▶ engine here              against memcpy + its own load
                                    └─ chunks over TCP ─▶ 1, then N pullers elsewhere  against a raw stream of chunks

Every version is pulled by all of them in turn, and the raw stream takes its turns around the pull over TCP, so that
they see the same machine. "Elsewhere" is another process that is told that it runs on another machine. Both need all
the cores that there are, so what others take of them shows in their times; ``ratio_cpu`` compares what both ends of
either used.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import math
import shutil
import statistics
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from time import perf_counter
from typing import Any, Final

import msgspec
import numpy as np
import psutil
import zmq

from actors.core.actor import Actor, handles
from actors.core.leader import Leader
from actors.core.ref import ActorRef
from actors.core.system import ActorSystem
from actors.protocol.failures import Acknowledged
from actors.protocol.metrics import Event
from actors.protocol.services import LookupService, RegisterService, ServiceFound
from actors.protocol.weights import QueryVersions, VersionAvailable, Versions
from actors.roles import RoleArgs
from actors.rollout.engine import EngineSpec
from actors.trainer.backend import BackendSpec, LossSpec, MicroBatch
from actors.trainer.learning.samples import TrainSample, cut
from actors.trainer.publisher import Publisher
from actors.trainer.spans import SpanRecorder
from actors.weights.client import WeightClient
from actors.weights.segments import remove_segments, segment_directory, segment_path
from benchmarks import _baseline
from benchmarks._baseline import Ratio
from benchmarks._command import Result, command_line, measured, show
from benchmarks._jobs import BenchmarkFailed, hardware
from benchmarks._processes import beside, cpu_s, on_uvloop
from benchmarks.data_plane import _curve
from benchmarks.data_plane._echo import new_system
from benchmarks.data_plane._shares import before_and_after
from benchmarks.data_plane._weights import Pull, PullDone
from configs.limits import DEFAULT_LIMITS
from configs.schema import JobConfig
from transport.address import ActorAddress

DEFAULT_BYTES: Final = 600_000_000
"""300 million parameters in bfloat16."""
RATIOS: Final = (
    Ratio("ratio_tcp", floor=0.7, tolerance=0.2),
    Ratio("ratio_memcpy", ceiling=1.5, tolerance=0.2),
    Ratio("ratio_all_pullers", ceiling=math.inf, tolerance=0.5),
    Ratio("sent_by_trainer", ceiling=2.0),
)
ROUNDS: Final = 15
"""A pull's time wavers by a tenth, and so does the raw stream's: medians of nine by 4 %, of fifteen by 3."""
_ROUNDS_OF_MANY: Final = 9
"""At most, of many pullers at once."""
PULLERS: Final = 8
JOB: Final = "bench"
_QUIET_LOOKS: Final = 240
_QUIET_LOOK_S: Final = 0.5
_IDLE_S: Final = 0.1
"""CPU seconds of all processes together in half a second."""


def job_config() -> JobConfig:
    """A job that says nothing but its name."""
    return JobConfig.model_validate(
        {
            "name": JOB,
            "steps": 1,
            "model": {"source": "hf", "path": "unused", "dtype": "bfloat16"},
            "data": {"source": "jsonl", "path": "unused"},
            "reward": {"kind": "exact_match"},
            "weights": {"delta": False},  # versions here are equal; deltas are measured by `bench delta`
        }
    )


class Scheduler(Actor):
    """As much of a scheduler as weights need: who serves what."""

    def __init__(self) -> None:
        self._services: dict[str, ActorAddress] = {}

    @handles(RegisterService)
    async def register(self, message: RegisterService) -> Acknowledged:
        self._services[message.role] = message.address
        return Acknowledged()

    @handles(LookupService)
    async def lookup(self, message: LookupService) -> ServiceFound:
        return ServiceFound(address=self._services.get(message.role))

    @handles(Event)
    async def event(self, message: Event) -> None:
        """Nobody reads it here."""

    @handles(VersionAvailable)
    async def available(self, message: VersionAvailable) -> None:
        """Nobody waits for it here."""


class Bystander(Actor):
    """Lends its context to what an actor owns, so that it is measured by itself."""


class Children:
    """Processes of this benchmark; they end with ``exits``."""

    def __init__(self, exits: contextlib.ExitStack) -> None:
        self._exits = exits
        self._newest: dict[str, psutil.Process] = {}

    def start(self, kind: str, args: dict[str, Any]) -> str:
        """Start one; the line in which it says where it is."""
        process = self._exits.enter_context(beside("data_plane._weights", kind, json.dumps(args)))
        self._newest[kind] = psutil.Process(process.pid)
        assert process.stdout is not None
        return process.stdout.readline()

    async def actor(self, kind: str, args: dict[str, Any]) -> ActorAddress:
        """Start one that hosts an actor; it may talk to us before it says where it is."""
        return msgspec.json.decode(await asyncio.to_thread(self.start, kind, args), type=ActorAddress)

    def cpu_s(self, kind: str) -> float:
        """CPU seconds so far of the one of ``kind`` that was started last."""
        used = self._newest[kind].cpu_times()
        return used.user + used.system


async def quiet() -> None:
    """Until nobody computes any more: a machine makes memory ready for the next version, on cores of its own.

    Raises ``BenchmarkFailed`` when that takes too long.
    """
    before_s = -math.inf
    for _ in range(_QUIET_LOOKS):
        now_s = _children_cpu_s()
        if now_s - before_s < _IDLE_S:
            return
        before_s = now_s
        await asyncio.sleep(_QUIET_LOOK_S)
    raise BenchmarkFailed(
        f"the benchmark's processes still compute after {_QUIET_LOOKS * _QUIET_LOOK_S:.0f} s with nothing to do"
    )


def _children_cpu_s() -> float:
    used_s = 0.0
    for child in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):  # it has just ended
            used_s += sum(child.cpu_times()[:2])
    return used_s


class RawStream:
    """The limit: a file's chunks through plain sockets. ``kept``: each is also put in its place, as weights must be."""

    def __init__(self, family: Children, sockets: int) -> None:
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context(io_threads=sockets)
        self._sockets: list[zmq.Socket[bytes]] = []
        for port in json.loads(family.start("raw", {"sockets": sockets})):
            socket = self._context.socket(zmq.DEALER)
            socket.setsockopt(zmq.RCVHWM, 8)
            _curve.secure_dialer(socket)
            socket.connect(f"tcp://127.0.0.1:{port}")
            self._sockets.append(socket)
        self._place = np.zeros(0, np.uint8)

    def take(self, path: Path, chunk_bytes: int, *, kept: bool) -> float:
        """Seconds for all chunks of ``path``."""
        size = path.stat().st_size
        if kept and len(self._place) != size:
            self._place = np.ones(size, np.uint8)
        place, stride = self._place.data, len(self._sockets)
        began = perf_counter()
        for first, socket in enumerate(self._sockets):
            order = {"path": str(path), "chunk_bytes": chunk_bytes, "first": first, "stride": stride}
            socket.send(json.dumps(order).encode())
        for start in range(0, size, chunk_bytes):
            frame = self._sockets[start // chunk_bytes % stride].recv(copy=False)
            if kept:
                place[start : start + chunk_bytes] = frame.buffer
        return perf_counter() - began

    def close(self) -> None:
        for socket in self._sockets:
            socket.send(b"null")
            socket.close(linger=100)
        self._context.term()


class Bench:
    """A trainer, its weight server, an engine beside it, and pullers elsewhere."""

    def __init__(self, family: Children, scratch: Path, model: Path, sockets: int = 1, *, device: str = "cpu") -> None:
        self.family = family
        self._sockets = sockets
        self._device = device
        self.run_dir = scratch / "run"
        self.memory = segment_directory() / f"headrace-bench-{scratch.name}"
        self._model = model
        self.system: ActorSystem = new_system("here")
        self.version = 0
        self.found: dict[str, list[float]] = {}

    async def start(self) -> None:
        from actors.rollout.engines.torch.torch_engine import TorchEngine
        from actors.trainer.backends.torch.torch_backend import TorchBackend

        self.memory.mkdir()
        await self.system.start()
        await self.system.spawn("scheduler", Scheduler())
        self.role = role = RoleArgs(
            role="weights",
            name="weights",
            node="here",
            job=job_config().model_dump_json(),
            model_path="",
            run_dir=str(self.run_dir),
            scheduler=self.system.address("scheduler"),
            metrics=self.system.address("scheduler"),
        )
        self.server = await self.family.actor("server", {"role": msgspec.to_builtins(role), "sockets": self._sockets})
        trainer = Bystander()
        await self.system.spawn("trainer", trainer)
        self._backend, self.engine = TorchBackend(), TorchEngine()
        await self._backend.start(BackendSpec(model_path=self._model, dtype="bfloat16", device=self._device, threads=2))
        await self.engine.start(
            EngineSpec(
                model_path=self._model,
                dtype="bfloat16",
                device=self._device,
                max_running=2,
                max_context_tokens=64,
                threads=2,
            )
        )
        scheduler = Leader(trainer.ctx, self.system.address("scheduler"))
        self._publisher = Publisher(
            trainer.ctx,
            self._backend,
            SpanRecorder(trainer.ctx, job=JOB, track="trainer", metrics=lambda: self.system.address("metrics")),
            job=JOB,
            run_dir=self.run_dir,
            scheduler=scheduler,
        )
        await self._publisher.find_server()
        self._neighbour = WeightClient(trainer.ctx, JOB)

    async def stop(self) -> None:
        await self._publisher.settle()
        await self.engine.close()
        await self._backend.close()
        await self.system.stop()
        remove_segments(self.run_dir)
        shutil.rmtree(self.memory)

    @property
    def segment(self) -> Path:
        return segment_path(self.run_dir, self.version)

    def note(self, name: str, value: float) -> float:
        self.found.setdefault(name, []).append(value)
        return value

    def median(self, name: str) -> float:
        return statistics.median(self.found[name])

    async def publish(self) -> None:
        """The next version, as the trainer does it: after training."""
        self.version += 1
        await self._backend.accumulate(_micro_batch(), LossSpec())
        await asyncio.sleep(1.5)
        await quiet()
        began = perf_counter()
        await self._publisher.publish(self.version)
        self.note("publish_stall", perf_counter() - began)
        await self._publisher.settle()
        self.note("publish", perf_counter() - began)

    async def pull_here(self) -> None:
        """Map, verify, load; and beside it one memcpy, and the engine's load of what lies in its own memory."""
        began = perf_counter()
        pulled = await self._neighbour.pull(self.server, self.version)
        assert pulled.mapped, "a puller on the trainer's machine maps"
        self.note("map", perf_counter() - began)
        await self.engine.load_weights(pulled.tensors, pulled.dtypes, self.version, in_flight="recompute")
        self.note("map_and_load", perf_counter() - began)
        own = {name: array.copy() for name, array in pulled.tensors.items()}
        began = perf_counter()
        await self.engine.load_weights(own, pulled.dtypes, self.version, in_flight="recompute")
        self.note("load", perf_counter() - began)
        source = np.fromfile(self.segment, np.uint8)
        place = np.ones_like(source)
        began = perf_counter()
        np.copyto(place, source)
        self.note("memcpy", perf_counter() - began)
        pulled.close()

    def raw_turn(self, raw: RawStream) -> None:
        """The newest version's chunks through the raw stream, before and after a pull, so neither has a better one."""
        before_s = cpu_s() + self.family.cpu_s("raw")
        self.note("raw", raw.take(self.segment, DEFAULT_LIMITS.bulk_chunk_bytes, kept=False))
        self.note("raw_both_cpu", cpu_s() + self.family.cpu_s("raw") - before_s)

    async def puller(self, name: str, machine: str, family: Children | None = None) -> ActorRef:
        """A new process that pulls, on ``machine``; empty: on this one. It ends with ``family``, or with all others."""
        memory = self.memory / machine  # of its own: pullers that share one keep one spare together
        memory.mkdir(exist_ok=True)
        args = {"name": name, "job": JOB, "machine": machine, "memory": str(memory), "sockets": self._sockets}
        return self.system.ref(await (family or self.family).actor("puller", args))

    async def pull_there(self, pullers: Sequence[ActorRef]) -> list[PullDone]:
        """All of them pull the newest version at once."""
        order = Pull(weights=self.server, policy_version=self.version)
        return await asyncio.gather(*(puller.ask(order, PullDone, timeout_s=60.0) for puller in pullers))


def _micro_batch() -> MicroBatch:
    """One short sample."""
    tokens = np.arange(3, 7, dtype=np.int32)
    zeros = np.zeros(4, np.float32)
    sample = TrainSample(
        prompt=0, sibling=0, prompt_ids=tokens, tokens=tokens, logprobs=zeros, stale=zeros > 0, advantage=1.0
    )
    return next(iter(cut([sample], budget_tokens=64, keep_zero=True)))


def make_model(path: Path, size_bytes: int, positions: int = 512) -> None:
    """A random bfloat16 checkpoint of about ``size_bytes``, as deep as wide; its rotary positions cost nothing."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    hidden = 1024 if size_bytes >= 100_000_000 else 64
    layer_bytes = 2 * (4 * hidden * hidden + 3 * hidden * 3 * hidden)
    vocab = 16_384 if hidden == 1024 else 128
    layers = max(1, round((size_bytes - 2 * vocab * hidden) / layer_bytes))
    config = AutoConfig.for_model(
        "qwen3",
        vocab_size=vocab,
        hidden_size=hidden,
        num_hidden_layers=layers,
        num_attention_heads=hidden // 64,
        num_key_value_heads=hidden // 64,
        head_dim=64,
        intermediate_size=3 * hidden,
        max_position_embeddings=positions,
        tie_word_embeddings=True,
    )
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).to(torch.bfloat16).save_pretrained(path)
    from tests.tiny_checkpoint import save_tokenizer

    save_tokenizer(path)


async def _measure(options: argparse.Namespace, scratch: Path, model: Path, family: Children) -> Result:
    bench = Bench(family, scratch, model, options.sockets)
    raw = RawStream(family, options.sockets)
    await bench.start()
    try:
        alone = [await bench.puller("alone", "elsewhere")]
        for _ in range(options.rounds + 1):  # the first is for warming up
            await bench.publish()
            await bench.pull_here()
            bench.raw_turn(raw)
            before_s = family.cpu_s("server")
            done = await bench.pull_there(alone)
            bench.note("tcp", done[0].seconds)
            bench.note("tcp_cpu", done[0].cpu_s)
            bench.note("tcp_both_cpu", done[0].cpu_s + family.cpu_s("server") - before_s)
            bench.raw_turn(raw)
            bench.note("raw_kept", raw.take(bench.segment, DEFAULT_LIMITS.bulk_chunk_bytes, kept=True))
        size = bench.segment.stat().st_size
        for values in bench.found.values():
            del values[: len(values) // (options.rounds + 1)]  # of the first version
        divided = await before_and_after(bench, bench.role, options) if options.sources > 1 else {}
        return {"bytes": size, **_figures(bench, size), **await _spread(bench, options, size), **divided}
    finally:
        raw.close()
        await bench.stop()


async def _spread(bench: Bench, options: argparse.Namespace, size: int) -> Result:
    """Many pullers at once, on ``options.machines`` other machines."""
    names = [(f"many-{n}", f"machine-{n % options.machines}") for n in range(options.pullers)]
    many = [await bench.puller(name, machine) for name, machine in names]
    versions = bench.system.ref(bench.server)
    sent: list[int] = []
    for _ in range(min(options.rounds, _ROUNDS_OF_MANY) + 1):
        await bench.publish()
        before = (await versions.ask(QueryVersions(job=JOB), Versions)).sent_bytes
        began = perf_counter()
        await bench.pull_there(many)
        bench.note("all_pullers", perf_counter() - began)
        sent.append((await versions.ask(QueryVersions(job=JOB), Versions)).sent_bytes - before)
    del bench.found["all_pullers"][0]  # for warming up
    return {
        "pullers": len(many),
        "machines": options.machines,
        "all_pullers_ms": round(1000 * bench.median("all_pullers"), 1),
        "ratio_all_pullers": round(bench.median("all_pullers") / bench.median("tcp"), 2),
        "ratios_all_pullers": [round(seconds / bench.median("tcp"), 2) for seconds in bench.found["all_pullers"]],
        "sent_by_trainer": round(max(sent) / size, 3),
    }


def _figures(bench: Bench, size: int) -> Result:
    seconds = {f"{name}_ms": round(1000 * bench.median(name), 1) for name in bench.found}
    return {
        "gb_per_second_tcp": round(size / bench.median("tcp") / 1e9, 2),
        "raw_gb_per_second": round(size / bench.median("raw") / 1e9, 2),
        "ratio_tcp": round(bench.median("raw") / bench.median("tcp"), 3),
        "raw_kept_gb_per_second": round(size / bench.median("raw_kept") / 1e9, 2),
        "ratio_tcp_kept": round(bench.median("raw_kept") / bench.median("tcp"), 3),
        "ratio_cpu": round(bench.median("raw_both_cpu") / bench.median("tcp_both_cpu"), 3),
        "ratio_memcpy": round(bench.median("map_and_load") / (bench.median("memcpy") + bench.median("load")), 3),
        **seconds,
    }


def measure(options: argparse.Namespace, scratch: Path) -> Result:
    """All of it in ``scratch``."""
    machine, model = hardware(), scratch / "model"
    make_model(model, options.bytes)

    def once() -> Result:
        own = Path(tempfile.mkdtemp(prefix="run-", dir=scratch))
        with contextlib.ExitStack() as exits:
            return on_uvloop(_measure(options, own, model, Children(exits)))

    return {"hardware": machine, **_curve.plain_and_secure(once, options)}


def main(args: list[str]) -> int:
    """Measure and print."""
    parser = command_line("weights", __doc__)
    parser.add_argument("--bytes", type=int, default=DEFAULT_BYTES, help="size of the model's weights")
    parser.add_argument("--rounds", type=int, default=ROUNDS, help="versions; medians of them are printed")
    parser.add_argument(
        "--sockets", type=int, default=1, help="for chunks, ours and the raw stream's, each with an I/O thread"
    )
    parser.add_argument("--pullers", type=int, default=PULLERS, help="that pull at once")
    parser.add_argument("--machines", type=int, default=1, help="over which they are spread")
    parser.add_argument("--sources", type=int, default=1, help="machines over which the trainer's copy is divided")
    _curve.add_option(parser)
    _baseline.add_options(parser)
    options = parser.parse_args(args)
    result = measured(measure, options)
    code = _baseline.settle(result, _curve.baseline_name("weights", options), RATIOS, options)
    show(result, options)
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
