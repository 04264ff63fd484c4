"""The backend of a trainer whose job shares a training service: it asks, and computes nothing itself.

    accumulate, step, … ─▶ TrainCall(life, number) ─▶ service: waits for the slice, computes ─▶ TrainAnswer
                                └── the link breaks: the same number again, for ``limits.service_patience_s``
    Down of the service between two calls ─▶ is it there again within that time? ─▶ else the trainer ends by BundleLost

Invariants
- A call is computed once or not at all: a repeat has the number of the first time (``actors/protocol/training.py``).
- Whatever the service's backend has raised is raised here, under the same name if that is one of ours.
- A life that is lost is never replaced behind the trainer's back: every call after it is BundleLost. Its state was half
  of a step, and only the trainer's next life knows from where to go on.
- It imports nothing that computes.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TypeVar

import msgspec
import numpy as np

from actors.core.context import Context
from actors.core.errors import DeadlineExceeded, NotSent, RefusalReason, Refused, RemoteError, SentNoReply
from actors.core.message import Message
from actors.core.patience import is_still_there
from actors.core.watch import Down, Gone
from actors.protocol.training import (
    Accumulate,
    Accumulated,
    AttachBundle,
    BundleAttached,
    CallTimes,
    DetachBundle,
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
    StepsCommitted,
    TrainAnswer,
    TrainBody,
    TrainCall,
    TrainOutcome,
    Valued,
    Values,
)
from actors.protocol.weights import Manifest
from actors.trainer.backend import BackendSpec, LossSpec, MicroBatch, MicroBatchStats, StepResult, StoredBytes
from actors.trainer.backends.remote_errors import error_named, error_of
from actors.trainer.errors import BackendClosed, BundleLost, ServiceFailed
from actors.weights.segments import host_id
from transport.address import ActorAddress

R = TypeVar("R", bound=Message)
Outcome = TypeVar("Outcome", bound=TrainOutcome)

_GONE = frozenset({RefusalReason.OLDER_LIFE, RefusalReason.UNKNOWN_ACTOR, RefusalReason.STOPPING})
"""Refusals by which a service says that it is not, or no longer, the one that was asked."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Client:
    """Says who asks a training service, and as what. ``checkpoint_step``: see ``AttachBundle``."""

    job: str
    run: str
    backend: str
    priority: int = 0
    share: float = 1.0


class ServiceBackend:
    """Implements ``TrainBackend``. ``connect`` comes before ``start``; whose ctx it has passes every ``Down`` on."""

    def __init__(self, client: Client, service: ActorAddress) -> None:
        self.kind = client.backend
        self._client = client
        self._service = service
        self._ctx: Context | None = None
        self._life = ""
        self._committed = 0
        self._number = 0
        self._closed = False
        self._stored: StoredBytes | None = None
        self._times = CallTimes()
        self.resumed_step: int | None = None
        """Number of steps in the state that the service had kept, and that it goes on from."""

    def connect(self, ctx: Context, *, checkpoint_step: int = 0) -> None:
        """Say through whom it asks, and how many steps the trainer's newest checkpoint holds."""
        self._ctx, self._checkpoint_step = ctx, checkpoint_step

    def taken_times(self) -> CallTimes:
        """Times of the calls since this was asked last."""
        times, self._times = self._times, CallTimes()
        return times

    def committed(self, steps: int) -> None:
        """The job has committed so many steps: from that state its next life may go on."""
        self._committed = steps
        said = StepsCommitted(job=self._client.job, life=self._life, steps=steps)
        self._context.ref(self._service).tell(said)

    # ------------------------------------------------------------ TrainBackend

    async def start(self, spec: BackendSpec) -> None:
        ctx, client = self._context, self._client
        question = AttachBundle(
            job=client.job,
            trainer=ctx.self_address,
            host=host_id(),
            run=client.run,
            backend=client.backend,
            spec=msgspec.json.encode(spec, enc_hook=str).decode(),
            wait_s=ctx.limits.service_wait_s,
            limit_s=ctx.limits.ready_timeout_s,
            checkpoint_step=self._checkpoint_step,
            priority=client.priority,
            share=client.share,
        )
        attached = await self._ask(question, BundleAttached, question.wait_s + question.limit_s)
        if attached.failure is not None:
            raise error_of(attached.failure)
        self._life, self._stored, self.resumed_step = attached.life, attached.stored, attached.resumed_step
        ctx.watch(self._service)

    def heard(self, message: Down) -> None:
        """End the trainer by BundleLost, unless a link broke that is soon there again: it may have no call to make."""
        if self._ctx is not None and not self._closed and message.address == self._service:
            self._ctx.start_task(self._see_to_it(self._ctx, message), "see whether the training service is there")

    async def _see_to_it(self, ctx: Context, message: Down) -> None:
        """Raises:
        BundleLost: this life of the service is gone.
        """
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
        limit_s = self._context.limits.train_step_timeout_s
        return (await self._call(Score(batch, temperature, reference), Scored, limit_s)).logprobs

    async def values(self, batch: MicroBatch) -> np.ndarray:
        return (await self._call(Values(batch), Valued, self._context.limits.train_step_timeout_s)).values

    async def accumulate(self, batch: MicroBatch, loss: LossSpec) -> MicroBatchStats:
        limit_s = self._context.limits.train_step_timeout_s
        return (await self._call(Accumulate(batch, loss), Accumulated, limit_s)).stats

    async def step(self, *, weight: float) -> StepResult:
        return (await self._call(Step(weight), Stepped, self._context.limits.train_step_timeout_s)).result

    async def export_segment(self, path: Path, *, job: str, policy_version: int, chunk_bytes: int) -> Manifest:
        """``job`` is that of the manifest, which is ours."""
        body = ExportSegment(str(path.absolute()), policy_version, chunk_bytes, job)
        return (await self._call(body, Exported, self._context.limits.publish_timeout_s)).manifest

    async def save(self, directory: Path) -> None:
        await self._call(Save(str(directory.absolute())), Finished, self._context.limits.checkpoint_timeout_s)

    async def load(self, directory: Path) -> None:
        await self._call(Load(str(directory.absolute())), Finished, self._context.limits.checkpoint_timeout_s)

    async def export_checkpoint(self, directory: Path) -> None:
        body = ExportCheckpoint(str(directory.absolute()))
        await self._call(body, Finished, self._context.limits.checkpoint_timeout_s)

    async def close(self, *, keep: bool = True) -> None:
        """``keep``: the trainer's next life may go on from what it has committed."""
        if self._life and not self._closed and self._ctx is not None:
            said = DetachBundle(job=self._client.job, life=self._life, keep=keep)
            self._ctx.ref(self._service).tell(said)
        self._closed, self._stored = True, None

    # ------------------------------------------------------------ asking

    @property
    def _context(self) -> Context:
        if self._ctx is None or self._closed:
            raise BackendClosed("the service backend was called before start or after close")
        return self._ctx

    async def _call(self, body: TrainBody, kind: type[Outcome], limit_s: float) -> Outcome:
        if not self._life or self._closed:
            raise BackendClosed(f"the service backend was called {'after close' if self._closed else 'before start'}")
        self._number += 1
        limits = self._context.limits
        question = TrainCall(
            job=self._client.job,
            life=self._life,
            number=self._number,
            body=body,
            wait_s=limits.service_wait_s,
            limit_s=limit_s,
        )
        answer = await self._ask(question, TrainAnswer, question.wait_s + limit_s)
        self._times = self._times.plus(answer.times)
        outcome = answer.outcome
        if isinstance(outcome, Failed):
            raise error_of(outcome)
        if not isinstance(outcome, kind):
            raise ServiceFailed(f"a {type(body).__name__} was answered with {type(outcome).__name__}; a bug of ours")
        return outcome

    async def _ask(self, question: Message, reply: type[R], held_s: float) -> R:
        """Ask this life of the service until there is an answer, which it may hold for ``held_s``.

        Raises:
            BundleLost: it is gone, or out of reach for longer than a link takes to come back; or it says so.
            ServiceRefuses, ServiceBusy, ServiceFailed, other errors of ours: what it says.
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
