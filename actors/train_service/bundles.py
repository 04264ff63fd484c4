"""One job's bundle in a training service: a backend, the calls made of it, and what they have taken.

    TrainCall.body ─ perform ─▶ the backend's method ─▶ its outcome
                                        └─ raises ─▶ Failed, and the bundle is broken if its state may be half changed

Invariants
- A backend computes on threads of its own and shares nothing with others but a frozen reference model: what a job's
  calls give does not depend on whose calls lie between them.
- Whatever a backend raises is an answer to its own trainer, never the end of the service.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from pathlib import Path
from typing import assert_never

from actors.core.errors import ReplyError
from actors.protocol.training import (
    Accumulate,
    Accumulated,
    AttachBundle,
    BundleAttached,
    CallTimes,
    ExportCheckpoint,
    Exported,
    ExportSegment,
    Failed,
    Finished,
    Load,
    Save,
    Score,
    Scored,
    Step,
    Stepped,
    TrainBody,
    TrainOutcome,
    Valued,
    Values,
)
from actors.train_service.calls import CallLog
from actors.train_service.errors import NoSlice
from actors.trainer.backend import TrainBackend
from transport.address import ActorAddress

_CHANGES = (Accumulate, Step, Load)
"""Calls that change a bundle's state: one that fails in the middle leaves it half changed."""
_ENDS_BURST = (ExportSegment, ExportCheckpoint)


@dataclass
class Bundle:
    """It is one life of a job's bundle. ``over``: why it has ended; empty while it lasts."""

    attach: AttachBundle
    life: str
    number: int
    """Place in the order in which trainers have asked."""
    backend: TrainBackend
    calls: CallLog = field(init=False)
    before: asyncio.Task[object] | None = None
    """End of the life before it, which this one waits for."""
    attached: asyncio.Future[BundleAttached | ReplyError] = field(init=False)
    """What its trainer is told, once the backend has started."""
    work: asyncio.Task[object] | None = None
    """The call, or the start, that is under way or was the last."""
    ending: asyncio.Task[object] | None = None
    heard_s: float = 0.0
    """Time at which its trainer was heard last."""
    over: str = ""
    is_broken: bool = False
    """Whether its state may be half changed."""
    times: CallTimes = field(default_factory=CallTimes)
    """Sums over all calls."""

    def __post_init__(self) -> None:
        self.calls = CallLog(self.job)
        self.attached = asyncio.get_running_loop().create_future()

    @property
    def job(self) -> str:
        return self.attach.job

    @property
    def trainer(self) -> ActorAddress:
        return self.attach.trainer

    async def begins(self) -> None:
        """Wait for the end of the life before it, for as long as its trainer waits for a slice.

        Raises:
            NoSlice: that takes longer: a call of it still computes, or its state is being stored.
        """
        if self.before is None:
            return
        wait_s = self.attach.wait_s
        try:
            async with asyncio.timeout(wait_s):
                await asyncio.shield(self.before)
        except TimeoutError:
            raise NoSlice(f"its former life has not ended within {wait_s:g} s (limits.service_wait_s)") from None


def ends_burst(body: TrainBody) -> bool:
    """Whether a burst is over after this call: the weights, or a checkpoint, have been handed over."""
    return isinstance(body, _ENDS_BURST)


async def perform(backend: TrainBackend, body: TrainBody) -> TrainOutcome:
    """Have the backend do what a call asks for. Raises what the backend raises."""
    match body:
        case Score():
            return Scored(await backend.score(body.batch, temperature=body.temperature, reference=body.reference))
        case Values():
            return Valued(await backend.values(body.batch))
        case Accumulate():
            return Accumulated(await backend.accumulate(body.batch, body.loss))
        case Step():
            return Stepped(await backend.step(weight=body.weight))
        case ExportSegment():
            manifest = await backend.export_segment(
                Path(body.path), job=body.job, policy_version=body.policy_version, chunk_bytes=body.chunk_bytes
            )
            return Exported(manifest)
        case Save():
            await backend.save(Path(body.directory))
        case Load():
            await backend.load(Path(body.directory))
        case ExportCheckpoint():
            await backend.export_checkpoint(Path(body.directory))
        case _:
            assert_never(body)
    return Finished()


def failure(error: Exception, body: TrainBody | None, limit_s: float) -> Failed:
    """What the trainer is told of an error. ``body``: the call that raised it; None: the start of the backend."""
    number = error.errno if isinstance(error, OSError) else None
    text = str(error)
    if isinstance(error, TimeoutError) and not text:
        text = f"it was not done within {limit_s:g} s"
    breaks = body is None or isinstance(body, _CHANGES) or isinstance(error, TimeoutError)
    return Failed(error=type(error).__name__, text=text, errno=number, breaks=breaks)
