"""The backend of a trainer whose job shares a training service: it asks the service, and computes nothing itself.

    accumulate, step, … ─▶ TrainCall(life, number) ─▶ service: waits for the slice, computes ─▶ TrainAnswer
                                └── the link breaks: the same number again, for ``limits.service_patience_s``
    Down of the service between two calls ─▶ is it there again within that time? ─▶ else the trainer ends by BundleLost

Invariants
- A call is computed once or not at all: a repeat has the number of the first time (``actors/protocol/training.py``).
- Errors of the service's backend are raised here again, under the same name if it is one of ours.
- A lost life is never replaced behind the trainer's back: every later call raises BundleLost. Its state was in the
  middle of a step, and only the trainer's next life knows from where to go on.
- This module imports nothing that computes.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TypeVar

import numpy as np

from actors.core.context import Context
from actors.core.errors import DeadlineExceeded, NotSent, RefusalReason, Refused, RemoteError, SentNoReply
from actors.core.message import Message
from actors.core.patience import is_still_there
from actors.core.watch import Down, Gone
from actors.protocol import training
from actors.protocol.weights import Manifest
from actors.trainer.backend import (
    AdamStep,
    BackendSpec,
    Learned,
    LossSpec,
    MemoryUse,
    MicroBatch,
    MicroBatchStats,
    StepResult,
    StoredBytes,
)
from actors.trainer.backends.remote_errors import error_named, error_of
from actors.trainer.errors import BackendClosed, BundleLost, ServiceFailed
from actors.weights.segments import host_id
from configs.limits import Limits
from transport.address import ActorAddress

R = TypeVar("R", bound=Message)
Outcome = TypeVar("Outcome", bound=training.TrainOutcome)

_GONE = frozenset({RefusalReason.OLDER_LIFE, RefusalReason.UNKNOWN_ACTOR, RefusalReason.STOPPING})
"""Refusals by which a service says that it is not, or no longer, the one that was asked."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ServiceClient:
    """Holds what a job tells a training service about itself."""

    job: str
    run: str
    backend: str
    ranks: int = 1
    priority: int = 0
    share: float = 1.0


class ServiceBackend:
    """Implements ``TrainBackend``. The service keeps the limit of each call, and does not count the wait."""

    is_shared = True

    def __init__(self, client: ServiceClient, service: ActorAddress) -> None:
        self.kind = client.backend
        self._client = client
        self._service = service
        self._ctx: Context | None = None
        self._life = ""
        self._committed = 0
        self._number = 0
        self._closed = False
        self._stored: StoredBytes | None = None
        self._times = training.CallTimes()

    def connect(self, ctx: Context) -> None:
        self._ctx = ctx

    def taken_times(self) -> training.CallTimes:
        """Times of the calls since the last call of this."""
        times, self._times = self._times, training.CallTimes()
        return times

    def taken_metrics(self) -> dict[str, float]:
        return self.taken_times().metrics()

    def committed(self, steps: int) -> None:
        self._committed = steps
        said = training.StepsCommitted(job=self._client.job, life=self._life, steps=steps)
        self._context.ref(self._service).tell(said)

    async def start(self, spec: BackendSpec, *, checkpoint_step: int = 0) -> int | None:
        ctx, client = self._context, self._client
        question = training.AttachBundle(
            job=client.job,
            trainer=ctx.self_address,
            host=host_id(),
            run=client.run,
            backend=client.backend,
            ranks=client.ranks,
            spec=spec.as_json(),
            wait_s=ctx.limits.service_wait_s,
            limit_s=ctx.limits.ready_timeout_s,
            checkpoint_step=checkpoint_step,
            priority=client.priority,
            share=client.share,
        )
        attached = await self._ask(question, training.BundleAttached, question.wait_s + question.limit_s)
        if attached.failure is not None:
            raise error_of(attached.failure)
        self._life, self._stored = attached.life, attached.stored
        ctx.watch(self._service)
        return attached.resumed_step

    def heard(self, message: Down) -> None:
        """End the trainer by BundleLost, unless a broken link is soon back: perhaps no call would notice."""
        if self._ctx is not None and not self._closed and message.address == self._service:
            self._ctx.start_task(self._see_to_it(self._ctx, message), "see whether the training service is there")

    async def _see_to_it(self, ctx: Context, message: Down) -> None:
        """Raises BundleLost when this life of the service is gone."""
        broke = message.reason is Gone.UNREACHABLE
        if broke and await is_still_there(ctx, self._service, ctx.limits.service_patience_s):
            ctx.watch(self._service)
            self.committed(self._committed)  # the service waits to hear from us, too
        elif not self._closed:
            raise BundleLost(self._gone(message.detail or message.reason))

    def _gone(self, why: object) -> str:
        return f"job {self._client.job}: the training service is not there any more: {why}"

    def stored_bytes(self) -> StoredBytes:
        if self._stored is None:
            raise BackendClosed("the service backend was called before start or after close")
        return self._stored

    async def score(self, batch: MicroBatch, *, temperature: float, reference: bool) -> np.ndarray:
        limit_s = self._limits.train_step_timeout_s
        return (
            await self._call(training.ScoreCall(batch, temperature, reference), training.TokensScored, limit_s)
        ).logprobs

    async def values(self, batch: MicroBatch) -> np.ndarray:
        return (await self._call(training.ValuesCall(batch), training.Valued, self._limits.train_step_timeout_s)).values

    async def accumulate(self, batch: MicroBatch, loss: LossSpec) -> MicroBatchStats:
        limit_s = self._limits.train_step_timeout_s
        return (await self._call(training.AccumulateCall(batch, loss), training.Accumulated, limit_s)).stats

    async def learn(self, batch: MicroBatch, loss: LossSpec, *, backward: bool = True) -> Learned:
        body, limit_s = training.LearnCall(batch, loss, backward), self._limits.train_step_timeout_s
        return (await self._call(body, training.TargetsLearned, limit_s)).learned

    async def drop_sums(self) -> None:
        await self._call(training.DropSums(), training.Finished, self._limits.train_step_timeout_s)

    async def use_recompute(self, way: str) -> None:
        """Do nothing: where nothing is measured no way is chosen."""

    async def measure(self, batch: MicroBatch, loss: LossSpec) -> MemoryUse | None:
        """Tell nothing: what is free at a service changes with the jobs whose state it holds."""
        return None

    async def step(self, *, weight: float, adam: AdamStep | None = None) -> StepResult:
        body, limit_s = training.StepCall(weight, adam), self._limits.train_step_timeout_s
        return (await self._call(body, training.Stepped, limit_s)).result

    async def export_segment(self, path: Path, *, job: str, policy_version: int, chunk_bytes: int) -> Manifest:
        """``job`` goes into the manifest; it is our own job."""
        body = training.ExportSegment(str(path.absolute()), policy_version, chunk_bytes, job)
        return (await self._call(body, training.Exported, self._limits.publish_timeout_s)).manifest

    async def save(self, directory: Path) -> None:
        await self._call(
            training.SaveCall(str(directory.absolute())), training.Finished, self._limits.checkpoint_timeout_s
        )

    async def load(self, directory: Path, *, optimizer: bool = True) -> None:
        body = training.LoadCall(str(directory.absolute()), optimizer)
        await self._call(body, training.Finished, self._limits.checkpoint_timeout_s)

    async def export_checkpoint(self, directory: Path) -> None:
        body = training.ExportCheckpoint(str(directory.absolute()))
        await self._call(body, training.Finished, self._limits.checkpoint_timeout_s)

    async def close(self, *, keep: bool = True) -> None:
        if self._life and not self._closed and self._ctx is not None:
            said = training.DetachBundle(job=self._client.job, life=self._life, keep=keep)
            self._ctx.ref(self._service).tell(said)
        self._closed, self._stored = True, None

    # ------------------------------------------------------------ asking

    @property
    def _context(self) -> Context:
        if self._ctx is None or self._closed:
            raise BackendClosed("the service backend was called before start or after close")
        return self._ctx

    @property
    def _limits(self) -> Limits:
        return self._context.limits

    async def _call(self, body: training.TrainBody, kind: type[Outcome], limit_s: float) -> Outcome:
        if not self._life or self._closed:
            raise BackendClosed(f"the service backend was called {'after close' if self._closed else 'before start'}")
        self._number += 1
        wait_s = self._limits.service_wait_s
        question = training.TrainCall(
            job=self._client.job, life=self._life, number=self._number, body=body, wait_s=wait_s, limit_s=limit_s
        )
        answer = await self._ask(question, training.TrainAnswer, wait_s + limit_s)
        self._times = self._times.plus(answer.times)
        outcome = answer.outcome
        if isinstance(outcome, training.CallFailed):
            raise error_of(outcome)
        if not isinstance(outcome, kind):
            raise ServiceFailed(f"a {type(body).__name__} was answered with {type(outcome).__name__}; a bug of ours")
        return outcome

    async def _ask(self, question: Message, reply: type[R], held_s: float) -> R:
        """Ask this life of the service until it answers, which it may do as late as after ``held_s``.

        Raises:
            BundleLost: the service is gone, or out of reach for ``service_patience_s``; or it says so.
            ServiceRefuses, ServiceBusy, ServiceFailed, other errors of ours: the service's answer.
        """
        ctx = self._context
        while True:
            try:
                return await ctx.ref(self._service).ask(question, reply, held_s + ctx.limits.ask_timeout_s)
            except RemoteError as error:
                raise error_named(error.error_type, error.detail) from error
            except DeadlineExceeded as error:
                raise ServiceFailed(f"the training service has not kept its limits: {error}") from error
            except (NotSent, SentNoReply, Refused) as error:
                gone = isinstance(error, Refused) and error.reason in _GONE
                if gone or not await is_still_there(ctx, self._service, ctx.limits.service_patience_s):
                    raise BundleLost(self._gone(error)) from error
                ctx.log.info("a call of the training service is repeated", after=str(error))
