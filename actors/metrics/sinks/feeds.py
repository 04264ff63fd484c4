"""Feeds the sinks of a run, each by an actor of its own, so that none can hold up the run's files or another sink.

    recorder ──StepRow, EvaluationRow, Samples, ProcessHealth──▶ SinkFeed ─▶ sink, on the feed's thread
             ◀──Down: the sink has failed── ┘                        └─▶ job ◀──Trouble── recorder

Invariants
- A sink is made on its thread, too: a library that is slow to import or to log in delays no start.
- A sink that raises or hangs, or is too far behind, is left out for the rest of this life of the run: its feed ends,
  people are told once, and the run goes on.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from actors.core.actor import Actor, handles
from actors.core.context import Context
from actors.core.errors import ActorError, AskError, DeadlineExceeded
from actors.core.message import Message
from actors.core.ref import ActorRef
from actors.core.watch import Down
from actors.metrics.sinks.prometheus_port import PrometheusSink
from actors.metrics.sinks.sink import Sink, SinkSetup
from actors.metrics.sinks.tensorboard_files import TensorBoardSink
from actors.metrics.sinks.wandb_run import WandbSink
from actors.protocol.evaluations import EvaluationRow
from actors.protocol.job_news import Trouble
from actors.protocol.metrics import Flush, Flushed, ProcessHealth, Samples, StepRow
from configs.schema import MetricsConfig
from transport.address import ActorAddress
from transport.transport import SendOutcome

_FAILED: Final = "failed: "
"""Beginning of the reason for which a feed ends when its sink fails."""


@dataclass(frozen=True, slots=True)
class SinkKind:
    """Describes a kind of sink: the key of the job file that asks for it, and how it is made."""

    name: str
    key: str
    wanted: Callable[[MetricsConfig], bool]
    make: Callable[[SinkSetup], Sink]


KINDS: Final = (
    SinkKind("TensorBoard", "tensorboard", lambda config: config.tensorboard, TensorBoardSink),
    SinkKind("Weights & Biases", "wandb_project", lambda config: config.wandb_project is not None, WandbSink),
    SinkKind("Prometheus", "prometheus_port", lambda config: config.prometheus_port is not None, PrometheusSink),
)


class SinkFeed(Actor):
    """Gives one sink what it is told, and ends when the sink fails."""

    def __init__(self, make: Callable[[], Sink]) -> None:
        self._make = make
        self.sink: Sink | None = None

    async def on_stop(self) -> None:
        if self.sink is not None:
            try:
                await self.ctx.run_blocking(self.sink.close)
            except Exception as error:  # noqa: BLE001 - as below; what the feed has ended for is to be told
                self.ctx.log.warning("a metrics sink could not be closed", error=repr(error))

    async def _give(self, work: Callable[[Sink], None]) -> None:
        try:
            await self.ctx.run_blocking(self._work, work)
        except Exception as error:  # noqa: BLE001 - a third party's code and network: no run ends for that
            if isinstance(error, ActorError):
                self.sink = None  # it hangs: its thread takes no further call
            self.ctx.stop(f"{_FAILED}{type(error).__name__}: {error}")

    def _work(self, work: Callable[[Sink], None]) -> None:
        """Do ``work`` on the sink, which the first call makes. Runs on the thread."""
        if self.sink is None:
            self.sink = self._make()
        work(self.sink)

    @handles(StepRow, EvaluationRow, Samples, ProcessHealth)
    async def told(self, message: StepRow | EvaluationRow | Samples | ProcessHealth) -> None:
        await self._give(lambda sink: _tell(sink, message))

    @handles(Flush)
    async def flush(self, _: Flush) -> Flushed:
        """Answer when the sink has taken all that was told before."""
        await self._give(lambda sink: None)
        return Flushed()


def _tell(sink: Sink, message: StepRow | EvaluationRow | Samples | ProcessHealth) -> None:
    match message:
        case StepRow(row=row):
            sink.write(int(row["step"] or 0), row)
        case EvaluationRow(row=row):
            sink.evaluation(row)
        case Samples():
            sink.samples(message.step, message.rows)
        case ProcessHealth():
            sink.observe(message.process, message.gauges)


class Sinks:
    """Holds the feeds of a run's sinks. Its actor passes on each Down, and calls ``remind`` now and then."""

    def __init__(self, job: str) -> None:
        self._job = job
        self._feeds: dict[ActorAddress, tuple[SinkKind, ActorRef]] = {}
        self._untold: list[Trouble] = []

    def __len__(self) -> int:
        return len(self._feeds)

    async def start(self, ctx: Context, setup: SinkSetup, kinds: tuple[SinkKind, ...] = KINDS) -> None:
        """Start a feed for each sink that the job asks for; it makes the sink by and by."""
        self._ctx = ctx
        for kind in kinds:
            if kind.wanted(setup.config):
                name = f"{ctx.self_address.name}.{kind.key}"
                feed = await ctx.spawn(name, SinkFeed(lambda make=kind.make: make(setup)))
                ctx.watch(feed.address)
                self._feeds[feed.address] = (kind, feed)
        self.tell(Flush(job=self._job))

    def tell(self, message: Message) -> None:
        """Tell every sink; one that is as far behind as its mailbox is large is left out."""
        for address, (_, feed) in list(self._feeds.items()):
            if feed.tell(message) is SendOutcome.FULL:
                self._leave_out(address, "it is too slow for the run")
                self._ctx.start_task(self._ctx.stop_child(address.name), f"stop {address.name}")

    def lost(self, down: Down) -> None:
        """Tell people of a sink that has failed."""
        if down.detail.startswith(_FAILED):
            self._leave_out(down.address, down.detail.removeprefix(_FAILED))

    def _leave_out(self, address: ActorAddress, why: str) -> None:
        if (found := self._feeds.pop(address, None)) is None:
            return
        kind = found[0]
        text = f"{kind.name} (metrics.{kind.key}) is left out from here on, and the run goes on: {why}"
        self._ctx.log.warning("a metrics sink has failed and is left out", sink=kind.name, error=why)
        self._untold.append(Trouble(job=self._job, kind=f"{kind.key}_failed", text=text))
        self.remind()

    def remind(self) -> None:
        """Tell the job of failures that it did not hear: at the start it may not be there yet."""
        if not self._untold:
            return
        own = self._ctx.self_address
        job = self._ctx.ref(ActorAddress(f"job.{self._job}", own.peer, own.endpoint))
        self._untold = [trouble for trouble in self._untold if job.tell(trouble) is not SendOutcome.QUEUED]

    async def flush(self) -> None:
        """Wait until all sinks have taken what they were told; those that need too long are left out."""
        await asyncio.gather(*(self._flush(feed) for _, feed in self._feeds.values()))

    async def _flush(self, feed: ActorRef) -> None:
        limit_s = self._ctx.limits.sink_flush_s
        try:
            await feed.ask(Flush(job=self._job), Flushed, timeout_s=limit_s)
        except DeadlineExceeded:
            self._leave_out(feed.address, f"it has not taken the last rows within {limit_s:g} s")
        except AskError:
            pass  # it has failed, as its Down says
