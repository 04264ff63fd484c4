"""One job's bundle in a training service: a backend, the calls to it, and the times that they took.

    TrainCall.body ─ perform ─▶ the backend's method ─▶ its outcome
                                        └─ raises ─▶ CallFailed; the bundle is broken if its state may be half changed

Invariants
- A backend computes on its own threads and shares nothing with others but a frozen reference model: the results of a
  job's calls do not depend on other jobs' calls in between.
- Whatever a backend raises is sent to its own trainer as an answer, and never ends the service.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from pathlib import Path
from typing import assert_never

import msgspec

from actors.core.errors import ReplyError
from actors.protocol import training
from actors.train_service.errors import CallOutOfOrder, NoSlice
from actors.train_service.notes import Notes
from actors.train_service.slice_queue import SliceQueue
from actors.train_service.tiers import BundleReport
from actors.trainer.backend import TrainBackend
from actors.trainer.backends.remote_errors import failed
from actors.trainer.errors import CallRefused, OutOfMemory
from configs.names import is_served_model
from transport.address import ActorAddress

_CHANGES = (training.AccumulateCall, training.LearnCall, training.DropSums, training.StepCall, training.LoadCall)
"""Calls that change a bundle's state: one that fails in the middle leaves it half changed."""
_BREAKS_NOTHING = (OutOfMemory, CallRefused)
"""Errors of such a call after which a life goes on. Gradient sums that are void for lack of memory are dropped by the
trainer, which repeats the step; a call that was refused has changed nothing."""
_ENDS_BURST = (training.ExportSegment, training.ExportCheckpoint)


class CallLog:
    """Remembers the last call of one life and its answer: each call is computed once, however often it is sent.

        number = last + 1 ─▶ begin: the answer is under way     number = last ─▶ that answer, also one under way
        anything else     ─▶ CallOutOfOrder

    One call at a time: the next one is accepted when the last has its answer. Only the last answer is kept, since a
    trainer that sends the next call has got it. ``number`` is that of the last call, 0 if there was none.
    """

    def __init__(self, job: str) -> None:
        self._job = job
        self._answer: asyncio.Future[training.TrainAnswer] | None = None
        self.number = 0

    @property
    def is_busy(self) -> bool:
        """Whether a call has no answer yet."""
        return self._answer is not None and not self._answer.done()

    def repeated(self, number: int) -> asyncio.Future[training.TrainAnswer] | None:
        """The answer of the last call if ``number`` is its; None: the call is the next one, ``begin`` it.

        Raises:
            CallOutOfOrder: it is neither, or the last call still computes.
        """
        if self._answer is not None and number == self.number:
            return self._answer
        if number != self.number + 1:
            raise CallOutOfOrder(f"job {self._job}: call {number} came after call {self.number}; nothing was computed")
        if self.is_busy:
            raise CallOutOfOrder(f"job {self._job}: call {number} came while call {self.number} is being computed")
        return None

    def begin(self) -> asyncio.Future[training.TrainAnswer]:
        """Count the next call; returns the future for its answer."""
        self.number += 1
        self._answer = asyncio.get_running_loop().create_future()
        return self._answer


@dataclass
class Bundle:
    """Holds the state of one life of a job's bundle. ``over``: why that life has ended; empty while it lasts."""

    attach: training.AttachBundle
    life: str
    number: int
    """Place in the order in which trainers have attached."""
    backend: TrainBackend
    calls: CallLog = field(init=False)
    before: asyncio.Task[object] | None = None
    """Task that ends the life before, which this one waits for."""
    attached: asyncio.Future[training.BundleAttached | ReplyError] = field(init=False)
    """Answer to the trainer, once the backend has started or failed to."""
    work: asyncio.Task[object] | None = None
    """Task of the call, or the start, that is under way or was the last."""
    ending: asyncio.Task[object] | None = None
    heard_s: float = 0.0
    """Time of the trainer's last message."""
    over: str = ""
    is_broken: bool = False
    """Whether the trained state may be half changed."""
    times: training.CallTimes = field(default_factory=training.CallTimes)
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

    @property
    def is_of_job(self) -> bool:
        """Whether a job's trainer asks for it, and not a client of the model server, whose log has all of its state."""
        return not is_served_model(self.job)

    def is_asked_for_by(self, message: training.AttachBundle) -> bool:
        """Whether ``message`` asks for this very life."""
        return (self.trainer, self.attach.run) == (message.trainer, message.run)

    async def begins(self) -> None:
        """Wait for the end of the life before, for as long as the trainer waits for a slice.

        Raises:
            NoSlice: it has not ended in time, since its call still computes or its state is still being stored.
        """
        if self.before is None:
            return
        wait_s = self.attach.wait_s
        try:
            async with asyncio.timeout(wait_s):
                await asyncio.shield(self.before)
        except TimeoutError:
            raise NoSlice(f"its former life has not ended within {wait_s:g} s (limits.service_wait_s)") from None

    def state(self, place: BundleReport | None, slices: SliceQueue, notes: Notes) -> training.BundleState:
        """The bundle's status, for the head and operators. ``place``: where its state lies; None: it has none yet."""
        job, times = self.job, self.times
        return training.BundleState(
            job=job,
            tier="" if place is None else "memory" if place.tier == "budget" else place.tier,
            state_bytes=0 if place is None else max(place.resident_bytes, place.host_bytes, place.disk_bytes),
            bursts=slices.bursts(job),
            asking_s=slices.asking_s(job),
            waited_s=times.waited_s,
            switch_s=times.switch_s,
            compute_s=times.compute_s,
            isolated=notes.is_isolated(job),
        )


def ends_burst(body: training.TrainBody, *, of_job: bool = True) -> bool:
    """Whether a burst ends with this call. A job's hands over the weights or a checkpoint.

    What a client's model will be asked next nobody knows: its burst ends with any call that adds no gradient.
    """
    if of_job:
        return isinstance(body, _ENDS_BURST)
    return not (isinstance(body, training.LearnCall) and body.backward) and not isinstance(body, training.DropSums)


async def perform(backend: TrainBackend, body: training.TrainBody) -> training.TrainOutcome:
    """Have the backend compute a call. Raises what the backend raises."""
    match body:
        case training.ScoreCall():
            return training.TokensScored(
                await backend.score(body.batch, temperature=body.temperature, reference=body.reference)
            )
        case training.ValuesCall():
            return training.Valued(await backend.values(body.batch))
        case training.AccumulateCall():
            return training.Accumulated(await backend.accumulate(body.batch, body.loss))
        case training.LearnCall():
            return training.TargetsLearned(await backend.learn(body.batch, body.loss, backward=body.backward))
        case training.StepCall():
            return training.Stepped(await backend.step(weight=body.weight, adam=body.adam))
        case training.ExportSegment():
            manifest = await backend.export_segment(
                Path(body.path), job=body.job, policy_version=body.policy_version, chunk_bytes=body.chunk_bytes
            )
            return training.Exported(manifest)
        case training.DropSums():
            await backend.drop_sums()
        case training.SaveCall():
            await backend.save(Path(body.directory))
        case training.LoadCall():
            await backend.load(Path(body.directory), optimizer=body.optimizer)
        case training.ExportCheckpoint():
            await backend.export_checkpoint(Path(body.directory))
        case _:
            assert_never(body)
    return training.Finished()


def failure(error: Exception, body: training.TrainBody | None, limit_s: float) -> training.CallFailed:
    """The trainer's answer for an error. ``body``: the call that raised it; None: the start of the backend."""
    said, late = failed(error), isinstance(error, TimeoutError)
    text = f"it was not done within {limit_s:g} s" if late and not said.text else said.text
    breaks = body is None or (isinstance(body, _CHANGES) and not isinstance(error, _BREAKS_NOTHING)) or late
    return msgspec.structs.replace(said, text=text, breaks=breaks)
