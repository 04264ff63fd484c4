"""The training service: computes for the trainers of several jobs, one burst after another.

    AttachBundle ─▶ may it be served? ─▶ a slice ─▶ backend.start ─▶ BundleAttached(life)
    TrainCall    ─▶ this life, this number? ─▶ a slice ─▶ the backend's method ─▶ TrainAnswer, kept until the next call
    DetachBundle, Down of the trainer, its next life ─▶ the bundle's life is over; its state may be kept

Invariants
- One call computes at a time (``slice_queue``), each once; its errors go to its own trainer alone (``bundles``).
- A life that is over stays over: its calls get BundleLost. The next life of the job waits for a call of the old one
  that still computes, since that call may be writing files.
- The trainer sets one limit for waiting and one for computing. A call that is not done within its limit breaks its
  bundle; its thread is abandoned.
- With ranks (``service_ranks``), a failed call is its job's error only if all ranks have answered; else this life ends.
- A permanent refusal gives its reason in a sentence (``admission``), and disturbs no other job.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from pathlib import Path

from actors.core.actor import Actor, concurrent, handles
from actors.core.errors import ReplyError
from actors.core.senders import SenderKind, sender_of
from actors.core.watch import Down, Gone
from actors.policies.sharing.slices import SliceRules, slice_policy
from actors.protocol.training import (
    AccumulateCall,
    AttachBundle,
    BundleAttached,
    CallFailed,
    CallTimes,
    DetachBundle,
    LearnCall,
    QueryService,
    ScoreCall,
    ServiceState,
    StepCall,
    StepsCommitted,
    TrainAnswer,
    TrainBody,
    TrainCall,
    TrainOutcome,
    ValuesCall,
)
from actors.ranks.errors import RankLost
from actors.ranks.followers import NOBODY, Followers
from actors.ranks.group import GroupFollowers
from actors.roles import ServiceArgs, service_process
from actors.train_service.admission import Admission, Agreed
from actors.train_service.bundles import Bundle, ends_burst, failure, perform
from actors.train_service.errors import MoveStuck, NeverFits, NoRoomToPark, NoSlice, NotYours, ResidencyError
from actors.train_service.notes import Notes
from actors.train_service.parked_files import ParkedFiles
from actors.train_service.residency import ParkedState, Residency, ResidencyRules
from actors.train_service.service_ranks import ServiceRanks
from actors.train_service.service_trace import ServiceTrace
from actors.train_service.slice_queue import SliceQueue
from actors.trainer.backend import TrainBackend
from actors.trainer.errors import BundleLost, ParkedStateDamaged, ServiceBusy, ServiceRefuses
from actors.trainer.parking import Parkable
from configs.names import is_served_model

MakeBackend = Callable[[str], TrainBackend]
MakeFiles = Callable[[Path], ParkedFiles]

_CANNOT_MOVE = (ResidencyError, ParkedStateDamaged, OSError)
"""Errors of moving a bundle's state into the memory where it is computed with, or out of it."""


class TrainService(Actor):
    """Serves the jobs that attach to it.

    ``make``: makes a backend by kind, by default over the service's ranks; ``files``: makes the store of states;
    ``followers``: the ranks that it leads.
    """

    def __init__(
        self,
        args: ServiceArgs,
        make: MakeBackend | None = None,
        files: MakeFiles = ParkedFiles,
        followers: Followers = NOBODY,
    ) -> None:
        self._config = args.config
        self._metrics = args.metrics
        self._ranks = ServiceRanks(followers)
        self._make = make or self._ranks.make
        self._files = files
        self._directory = Path(args.run_dir)
        self._bundles: dict[str, Bundle] = {}
        """Job → the newest life of its bundle."""
        self._lives = 0
        self._times = CallTimes()

    async def on_start(self) -> None:
        ctx, config, queue = self.ctx, self._config, self._config.queue
        self._began_s = ctx.now()
        await self._ranks.open(ctx)
        self._notes = Notes(self._directory, ctx.limits)
        if blamed := await ctx.run_blocking(self._notes.open):
            ctx.log.warning("the last life of this service ended while it computed", job=blamed)
        self._admission = Admission(config, self._notes, ctx.limits)
        rules = ResidencyRules(
            budget_bytes=config.memory_bytes,
            host_bytes=config.host_bytes,
            disk_bytes=config.disk_bytes,
            move_timeout_s=ctx.limits.service_move_timeout_s,
        )
        self._residency = Residency(
            rules, self._directory, now=ctx.now, run_blocking=ctx.run_blocking, files=self._files
        )
        await self._residency.open()
        slices = SliceRules(
            policy=queue.policy, hysteresis=queue.hysteresis, starvation_s=queue.starvation_s, gap_s=queue.gap_s
        )
        self._trace = ServiceTrace(ctx, service_process(config.name), self._metrics)
        self._slices = SliceQueue(ctx, slice_policy(slices), self._residency, self._trace)

    async def on_stop(self) -> None:
        self._slices.close()
        self._trace.flush()
        if not self._ranks.are_lost:  # else whoever computed is to blame
            await self.ctx.run_blocking(self._notes.close)
        await self._ranks.close()
        with contextlib.suppress(MoveStuck):  # perhaps the reason why we end
            await self._residency.close()  # before the backends, whose state may be moving
        for bundle in self._bundles.values():
            with contextlib.suppress(RankLost):  # it is why we end; the others are closed all the same
                await bundle.backend.close()

    # ------------------------------------------------------------ attaching

    @handles(AttachBundle)
    @concurrent
    async def attach(self, message: AttachBundle) -> BundleAttached:
        self._see_who_asks(message.job)
        bundle = self._bundles.get(message.job)
        if bundle is None or not bundle.is_asked_for_by(message):
            self._lives += 1
            number = self._lives  # before the wait, so that an overtaken request has the older life
            agreed = await self.ctx.run_blocking(self._admission.agree, message)
            bundle = self._begin_life(message, agreed, number)
        else:
            self._hear(bundle)
        answer = await asyncio.shield(bundle.attached)
        if isinstance(answer, Exception):
            raise answer
        return answer

    def _see_who_asks(self, job: str) -> None:
        """Check that a trainer speaks for its own job, and the model server for its models.

        The head, and this process, may speak for any.
        """
        process = self.ctx.sender_process
        sender = sender_of("" if process is None else process.name)
        is_foreign = sender.kind is SenderKind.SERVICE and sender.job != job
        is_foreign = is_foreign or (sender.kind is SenderKind.MODEL_SERVER and not is_served_model(job))
        if process is None or is_foreign:
            raise NotYours(f"{process or 'nobody'} spoke for the job {job!r}")

    def _begin_life(self, message: AttachBundle, agreed: Agreed, number: int) -> Bundle:
        job, before = message.job, self._bundles.get(message.job)
        if before is not None and before.is_asked_for_by(message):  # the same request, repeated
            return before
        if before is not None and before.number > number:
            raise BundleLost(f"job {job}: a later life of its trainer has attached meanwhile")
        others = [one.job for one in self._bundles.values() if one.job != job and not one.over and one.is_of_job]
        if not is_served_model(job) and len(others) >= self._config.jobs_max:
            raise ServiceBusy(f"the service {self._config.name} serves {len(others)} jobs already (jobs_max): {others}")
        if before is not None:
            self._end_life(before, "another life of its trainer has attached")
        life, ending = f"{self.ctx.self_address.peer.incarnation}.{number}", before and before.ending
        bundle = self._bundles[job] = Bundle(message, life, number, self._make(self._config.backend), before=ending)
        isolated = self._notes.is_isolated(job)
        self._slices.join(job, priority=message.priority, share=message.share, isolated=isolated, kept=bundle.is_of_job)
        self._hear(bundle)
        bundle.work = self.ctx.start_task(self._start(bundle, agreed), f"attach {job}")
        return bundle

    async def _start(self, bundle: Bundle, agreed: Agreed) -> None:
        """Start the backend of a new life, and answer how that went. Raises only RankLost."""
        message, job, asked_s = bundle.attach, bundle.job, self.ctx.now()
        answer: BundleAttached | ReplyError
        try:
            await bundle.begins()
            if bundle.over:
                raise BundleLost(f"job {job}: {bundle.over}")

            async def reserve() -> float:
                await self._residency.reserve(job, agreed.state_bytes)
                return 0.0

            await self._slices.begin(job, message.wait_s - (self.ctx.now() - asked_s), reserve)
            answer = await self._make_bundle(bundle, agreed, self.ctx.now() - asked_s)
        except RankLost:
            raise
        except Exception as error:  # noqa: BLE001 - an error of this job alone
            answer = self._why_not(bundle, error)
        if isinstance(answer, Exception) or answer.failure is not None:
            bundle.is_broken = True
            self._end_life(bundle, f"it could not be made: {answer}")
        bundle.attached.set_result(answer)

    async def _make_bundle(self, bundle: Bundle, agreed: Agreed, waited_s: float) -> BundleAttached | ReplyError:
        """Make a bundle, in a slice of its own."""
        job, began_s = bundle.job, self.ctx.now()
        await self.ctx.run_blocking(self._notes.begin, job)
        try:
            async with asyncio.timeout(bundle.attach.limit_s):
                answer: BundleAttached | ReplyError = await self._start_backend(bundle, agreed)
        except Exception as error:  # noqa: BLE001 - a backend's error goes to its own trainer
            answer = self._why_not(bundle, error)
            await self._ranks.agree(bundle.backend)
        computed_s = self.ctx.now() - began_s
        await self.ctx.run_blocking(self._notes.end, job)
        made = isinstance(answer, BundleAttached) and answer.failure is None and answer.resumed_step is None
        loads = made and not bundle.over and bundle.attach.checkpoint_step > 0  # at once, into this state
        self._slices.end(job, computed_s, ends_burst=not loads, leaves_news=False)
        self._count(bundle, CallTimes(waited_s, 0.0, computed_s))
        return answer

    def _why_not(self, bundle: Bundle, error: Exception) -> BundleAttached | ReplyError:
        """The answer to the trainer whose bundle could not be made."""
        self.ctx.log.warning("a bundle could not be made", job=bundle.job, error=repr(error))
        match error:
            case BundleLost() | ServiceRefuses():
                return error
            case NeverFits():
                return ServiceRefuses(f"the service {self._config.name}: {error}")
            case NoSlice() | NoRoomToPark():
                return ServiceBusy(f"job {bundle.job}: {error}")
            case _:
                return BundleAttached(life=bundle.life, failure=failure(error, None, bundle.attach.limit_s))

    async def _start_backend(self, bundle: Bundle, agreed: Agreed) -> BundleAttached:
        """Start the backend from the state that was kept of the job, if that is of use."""
        job, message = bundle.job, bundle.attach
        parked = await self._residency.find_parked(job)
        if parked is not None and not self._is_of_use(parked, message):
            parked = None
        try:
            await self._start_from(bundle, agreed, parked)
        except ParkedStateDamaged as error:
            self.ctx.log.warning("the kept state is of no use", job=job, why=str(error))
            await bundle.backend.close()
            bundle.backend, parked = self._make(self._config.backend), None
            await self._start_from(bundle, agreed, None)
        steps = message.checkpoint_step if parked is None else parked.steps
        await self.ctx.run_blocking(self._notes.began, job, message.run, steps)
        resumed = None if parked is None else parked.steps
        return BundleAttached(life=bundle.life, stored=bundle.backend.stored_bytes(), resumed_step=resumed)

    async def _start_from(self, bundle: Bundle, agreed: Agreed, parked: ParkedState | None) -> None:
        await bundle.backend.start(agreed.spec)
        if not isinstance(bundle.backend, Parkable):
            raise TypeError(f"a {bundle.backend.kind} backend cannot be parked")
        await self._residency.add(bundle.job, bundle.backend, parked=parked)

    def _is_of_use(self, parked: ParkedState, message: AttachBundle) -> bool:
        newer = parked.steps > message.checkpoint_step
        return newer and self._notes.may_go_on(message.job, message.run, parked.steps)

    # ------------------------------------------------------------ calls

    @handles(TrainCall)
    @concurrent
    async def call(self, message: TrainCall) -> TrainAnswer:
        self._see_who_asks(message.job)
        bundle = self._bundles.get(message.job)
        if bundle is None or bundle.life != message.life:
            raise BundleLost(f"the service {self._config.name} has no life {message.life} of the job {message.job}")
        self._hear(bundle)
        answer = bundle.calls.repeated(message.number)
        if answer is None:
            if bundle.over:
                raise BundleLost(f"job {message.job}: {bundle.over}")
            answer = bundle.calls.begin()
            bundle.work = self.ctx.start_task(self._answer(bundle, message, answer), f"a call of {message.job}")
        return await asyncio.shield(answer)

    async def _answer(self, bundle: Bundle, message: TrainCall, answer: asyncio.Future[TrainAnswer]) -> None:
        """Compute one call, and answer it whatever happens. Raises only RankLost."""
        job, times = bundle.job, CallTimes()
        try:
            trains = isinstance(message.body, ScoreCall | ValuesCall | AccumulateCall | LearnCall)
            waited_s, switch_s = await self._slices.begin(job, message.wait_s, trains=trains)
        except NoSlice as error:
            outcome: TrainOutcome = CallFailed(error=ServiceBusy.__name__, text=str(error))
        except Exception as error:  # noqa: BLE001 - withdrawn, or its state could not be moved, out of memory too
            outcome = CallFailed(error=BundleLost.__name__, text=f"job {job}: {error}", breaks=True)
        else:
            outcome, computed_s = await self._compute(bundle, message.body, message.limit_s)
            times = CallTimes(waited_s, switch_s, computed_s)
            self._count(bundle, times)
        if isinstance(outcome, CallFailed) and outcome.breaks:
            bundle.is_broken = True
            self._end_life(bundle, f"{outcome.error}: {outcome.text}")
        answer.set_result(TrainAnswer(number=message.number, outcome=outcome, times=times))

    async def _compute(self, bundle: Bundle, body: TrainBody, limit_s: float) -> tuple[TrainOutcome, float]:
        job, began_s = bundle.job, self.ctx.now()
        await self.ctx.run_blocking(self._notes.begin, job)
        try:
            async with asyncio.timeout(limit_s):
                outcome: TrainOutcome = await perform(bundle.backend, body)
        except Exception as error:  # noqa: BLE001 - a backend's error goes to its own trainer
            self.ctx.log.warning("a call failed", job=job, call=type(body).__name__, error=repr(error))
            outcome = failure(error, body, limit_s)
            await self._ranks.agree(bundle.backend)
        computed_s = self.ctx.now() - began_s
        ends = ends_burst(body, of_job=bundle.is_of_job) or (isinstance(outcome, CallFailed) and outcome.breaks)
        await self.ctx.run_blocking(self._notes.end, job, ends_burst=not isinstance(outcome, CallFailed) and ends)
        self._slices.end(job, computed_s, is_step=isinstance(body, StepCall), ends_burst=ends or bool(bundle.over))
        return outcome, computed_s

    def _count(self, bundle: Bundle, times: CallTimes) -> None:
        bundle.times = bundle.times.plus(times)
        self._times = self._times.plus(times)

    @handles(StepsCommitted)
    async def steps_committed(self, message: StepsCommitted) -> None:
        self._see_who_asks(message.job)
        bundle = self._bundles.get(message.job)
        if bundle is not None and bundle.life == message.life:
            self._hear(bundle)
            await self.ctx.run_blocking(self._notes.committed, message.job, message.steps)

    # ------------------------------------------------------------ the end of a life

    @handles(DetachBundle)
    @concurrent
    async def detach(self, message: DetachBundle) -> None:
        self._see_who_asks(message.job)
        bundle = self._bundles.get(message.job)
        if bundle is None:
            if not message.life and not message.keep:
                await self._residency.remove(message.job, forget=True)
                await self.ctx.run_blocking(self._notes.forget, message.job)
            return
        if message.life in ("", bundle.life):
            self._end_life(bundle, "it was detached", keep=message.keep)
            if bundle.ending is not None:
                await asyncio.shield(bundle.ending)

    @handles(Down)
    async def trainer_gone(self, message: Down) -> None:
        """End the lives of a trainer that is gone; an unreachable one, perhaps for a broken link, gets some time."""
        self._ranks.heard(message)
        for bundle in self._bundles.values():
            if bundle.trainer != message.address or bundle.over:
                continue
            if message.reason is Gone.UNREACHABLE:
                self.ctx.start_task(self._miss(bundle, self.ctx.now()), f"miss the trainer of {bundle.job}")
            else:
                self._end_life(bundle, "its trainer is gone")

    async def _miss(self, bundle: Bundle, since_s: float) -> None:
        """End a life unless its trainer is heard from within ``service_patience_s``."""
        await self.ctx.sleep(self.ctx.limits.service_patience_s)
        if bundle.heard_s < since_s:
            self._end_life(bundle, "its trainer is gone")

    def _hear(self, bundle: Bundle) -> None:
        """Note that the bundle's trainer has sent something, perhaps over a new link, and watch that trainer."""
        bundle.heard_s = self.ctx.now()
        self.ctx.watch(bundle.trainer)

    def _end_life(self, bundle: Bundle, why: str, *, keep: bool = True) -> None:
        """End a life. ``keep``: the job's next life may go on from this one's state; a client's model never does."""
        begins, keep = not bundle.over, keep and bundle.is_of_job
        if begins:
            bundle.over = why
            self.ctx.log.info("the life of a bundle is over", job=bundle.job, why=why)
            self._slices.withdraw(bundle.job, BundleLost(f"job {bundle.job}: {why}"))
        if begins or not keep:
            retire = self._retire(bundle, bundle.ending, keep=keep)
            bundle.ending = self.ctx.start_task(retire, f"retire {bundle.job}")

    async def _retire(self, bundle: Bundle, after: asyncio.Task[object] | None, *, keep: bool) -> None:
        """Remove a life's state once its calls are done; with ``keep``, store it first. Raises MoveStuck, RankLost."""
        job = bundle.job
        for task in (bundle.before, bundle.work, after):
            if task is not None:
                await asyncio.shield(task)
        try:
            if keep and not bundle.is_broken:
                await self._residency.store(job)
        except _CANNOT_MOVE as error:
            self.ctx.log.warning("the state of a bundle is not kept", job=job, why=str(error))
        try:
            await self._residency.remove(job, forget=not keep)
        except MoveStuck:  # the state may still be in memory: this process has to end
            raise
        except _CANNOT_MOVE as error:
            self.ctx.log.warning("a bundle could not be removed", job=job, why=str(error))
        await bundle.backend.close()
        if not keep:
            await self.ctx.run_blocking(self._notes.forget, job)
            if self._bundles.get(job) is bundle:  # else the job has attached again, and its next life waits for this
                self._slices.leave(job)
                del self._bundles[job]

    # ------------------------------------------------------------ status

    @handles(QueryService)
    async def state(self, message: QueryService) -> ServiceState:
        places = {place.job: place for place in self._residency.report().bundles}
        bundles = [bundle.state(places.get(job), self._slices, self._notes) for job, bundle in self._bundles.items()]
        return ServiceState(
            name=self._config.name,
            holder=self._slices.holder,
            up_s=self.ctx.now() - self._began_s,
            compute_s=self._times.compute_s,
            switch_s=self._times.switch_s,
            memory_bytes=sum(place.resident_bytes for place in places.values()),
            bundles=bundles,
            isolated=self._notes.isolated(),
        )


def build(args: ServiceArgs) -> dict[str, Actor]:
    followers = GroupFollowers(args) if args.size > 1 else NOBODY
    return {args.name: TrainService(args, followers=followers)}
