"""The other end of `bench tokens`, in a process of its own: workers without an engine.

``python -m benchmarks.data_plane._streamers`` and

    workers ENDPOINT NAME INCARNATION ACTOR FIRST COUNT SLOTS    peers with links
    flow ENDPOINT NAME INCARNATION ACTOR FIRST COUNT SLOTS       the same, of a head
    sockets ENDPOINT COUNT MESSAGES BYTES…                       DEALERs, plain frames

A worker registers, is assigned samples, makes one TokenReport for each step of them, and on ``go`` sends all of these
through the same outbox as the rollout worker's, as fast as the link takes them. Then it says what that cost it.
With ``flow`` reports hold several steps, are made while they are sent, and go on until nobody wants them any more.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Final

import numpy as np
import zmq

from actors.core.actor import Actor, handles
from actors.core.system import ActorSystem
from actors.core.tenure import RenewLease, Tenure
from actors.protocol.tokens import FinishReason, TokenReport
from actors.protocol.work import Assign, EngineStats, ReportsTaken
from actors.protocol.workers import Registered, RegisterWorker
from actors.rollout.outbox import Outbox
from benchmarks._processes import cpu_s, on_uvloop
from benchmarks.data_plane import _curve
from benchmarks.data_plane._echo import new_system
from supervisors.machine.machine import CLUSTER
from transport.address import ActorAddress, PeerId
from transport.zmq.context import new_context
from transport.zmq.socket import Context

JOB: Final = "bench"
VOCABULARY: Final = 50_000
_TURN: Final = 16
"""Reports that a worker sends before the next one gets its turn."""
_FLOW_STEPS: Final = 8
"""Engine steps in one report of a flow: so many wait where the scheduler is slower than its workers."""


def token_ids(prompt: int, sibling: int, tokens: int) -> np.ndarray:
    """int32[tokens] What a sample's response is: a function of its name, so that the ledger can be checked."""
    return ((np.arange(tokens) * 7919 + prompt * 104_729 + sibling * 1_299_709) % VOCABULARY).astype(np.int32)


def logprobs(tokens: np.ndarray) -> np.ndarray:
    """float32[n] of ``tokens``: any function of them would do."""
    return (-(tokens % 1000) / 64).astype(np.float32)


class Streamer(Actor):
    """Holds what it is assigned, and streams it when told to."""

    def __init__(self, scheduler: ActorAddress, slots: int) -> None:
        self._scheduler, self._slots = scheduler, slots
        self._numbers: list[int] = []
        self._names: list[tuple[int, int]] = []
        self._tokens = 0
        self._reports: Iterable[TokenReport] = ()
        self.assigned = asyncio.Event()

    async def on_start(self) -> None:
        address = self.ctx.self_address
        offer = RegisterWorker(
            job=JOB, worker=address, node="bench", engine="none", slots=self._slots, policy_version=0
        )
        asked_at_s, scheduler = self.ctx.now(), self.ctx.ref(self._scheduler)
        answer = await scheduler.ask(offer, Registered)
        self._term = answer.term
        renewal = RenewLease(job=JOB, holder=address.name, lease=answer.lease)
        Tenure(self.ctx, lambda: None).begin(scheduler, renewal, answer.lease_s, asked_at_s=asked_at_s)
        self._outbox = Outbox(scheduler, self.ctx.limits, self.ctx.now)

    @handles(Assign)
    async def assign(self, order: Assign) -> None:
        for work in order.work:
            for sample in work.samples:
                self._numbers.append(sample.assignment)
                self._names.append((work.prompt, sample.sibling))
        self._tokens = order.sampling.max_tokens
        if len(self._numbers) == self._slots:
            self.assigned.set()

    @handles(ReportsTaken)
    async def reports_taken(self, message: ReportsTaken) -> None:
        self._outbox.taken(message.sequence)

    def prepare(self) -> None:
        """Every step of every sample, the last one with LENGTH: made before the clock runs, as an engine's time is."""
        name, numbers = self.ctx.self_address.name, np.array(self._numbers, np.int64)
        tokens = np.stack([token_ids(*sample, self._tokens) for sample in self._names], axis=1)
        scores = logprobs(tokens)
        n = len(numbers)
        ones, running, ended = np.ones(n, np.int32), np.zeros(n, np.uint8), np.full(n, FinishReason.LENGTH, np.uint8)
        self._reports = [
            TokenReport.of(
                job=JOB, worker=name, term=self._term, sequence=step, policy_version=0, assignments=numbers,
                offsets=np.full(n, step, np.int32), counts=ones,
                finished=ended if step + 1 == self._tokens else running, tokens=tokens[step], logprobs=scores[step],
                stats=EngineStats(running=n, step_s=0.001, busy_s_total=step * 0.001, tokens_total=step * n),
            )
            for step in range(self._tokens)
        ]  # fmt: skip

    def flow(self) -> Iterator[TokenReport]:
        """Reports without an end in sight, as they are asked for: samples end only if they are let."""
        name, numbers, n = self.ctx.self_address.name, np.array(self._numbers, np.int64), len(self._numbers)
        tokens = (np.arange(n * _FLOW_STEPS) * 7919 % VOCABULARY).astype(np.int32)
        rest = {"tokens": tokens, "logprobs": logprobs(tokens), "finished": np.zeros(n, np.uint8)}
        counts = np.full(n, _FLOW_STEPS, np.int32)
        for sequence in range(self._tokens // _FLOW_STEPS):
            step = sequence * _FLOW_STEPS
            yield TokenReport.of(
                job=JOB, worker=name, term=self._term, sequence=sequence, policy_version=0, assignments=numbers,
                offsets=np.full(n, step, np.int32), counts=counts, **rest,
                stats=EngineStats(running=n, step_s=0.001, busy_s_total=step * 0.001, tokens_total=step * n),
            )  # fmt: skip

    def begin_flow(self) -> None:
        """Let ``stream`` make what it sends."""
        self._reports = self.flow()

    async def stream(self) -> None:
        """All that is prepared."""
        for step, report in enumerate(self._reports):
            self._outbox.send(report)
            if step % _TURN == _TURN - 1:
                await asyncio.sleep(0)
            while self._outbox.full:
                await asyncio.sleep(0.001)
                self._outbox.flush()
        while len(self._outbox):
            await asyncio.sleep(0.001)
            self._outbox.flush()


async def _start(
    name: str, scheduler: ActorAddress, slots: int, context: Context[Any] | None, cluster: str
) -> tuple[ActorSystem, Streamer]:
    job = scheduler.name.partition(".")[2]
    system = new_system(f"elsewhere.{job}.{name}" if job else name, context, cluster=cluster)
    await system.start()
    streamer = Streamer(scheduler, slots)
    await system.spawn(name, streamer)
    return system, streamer


async def _workers(kind: str, scheduler: ActorAddress, first: int, count: int, slots: int) -> None:
    context = None if _curve.keys() else new_context()  # a context has one allow-list
    flows = kind == "flow"
    cluster = CLUSTER if flows else "bench"
    started = [await _start(f"rollout-{first + i}", scheduler, slots, context, cluster) for i in range(count)]
    streamers = [streamer for _, streamer in started]
    await asyncio.gather(*(streamer.assigned.wait() for streamer in streamers))
    for streamer in streamers:
        streamer.begin_flow() if flows else streamer.prepare()
        await asyncio.sleep(0)
    await _when_told(lambda: asyncio.gather(*(streamer.stream() for streamer in streamers)))
    await asyncio.gather(*(system.stop() for system, _ in started))
    if context is not None:
        context.term()


async def _sockets(endpoint: str, count: int, messages: int, sizes: list[int]) -> None:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    sockets = [context.socket(zmq.DEALER) for _ in range(count)]
    for socket in sockets:
        _curve.secure_dialer(socket)
        socket.connect(endpoint)
    frames = [b"x" * size for size in sizes]

    async def send() -> None:
        loop = asyncio.get_running_loop()
        await loop.run_in_executor(None, send_all)

    def send_all() -> None:
        for _ in range(messages // _TURN):
            for socket in sockets:
                for _ in range(_TURN):
                    socket.send_multipart(frames)

    await _when_told(send)
    for socket in sockets:
        socket.close(linger=0)
    context.term()


async def _when_told(work: Callable[[], Any]) -> None:
    """Say that we are ready, do ``work`` after ``go``, say what it cost, wait until nobody wants us any more."""
    loop = asyncio.get_running_loop()
    print("ready", flush=True)
    await loop.run_in_executor(None, sys.stdin.readline)
    before = cpu_s()
    await work()
    print(cpu_s() - before, flush=True)
    await loop.run_in_executor(None, sys.stdin.readline)


def _main(kind: str, endpoint: str, *words: str) -> None:
    if kind in ("workers", "flow"):
        name, incarnation, actor, *numbers = words
        scheduler = ActorAddress(actor, PeerId(name, int(incarnation)), endpoint)
        on_uvloop(_workers(kind, scheduler, *map(int, numbers)))
    else:
        count, messages, *sizes = map(int, words)
        on_uvloop(_sockets(endpoint, count, messages, sizes))


if __name__ == "__main__":
    _main(*sys.argv[1:])
