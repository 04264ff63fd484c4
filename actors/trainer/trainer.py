"""The trainer: consumes the groups of a step as they finish, steps, publishes, commits.

    on_start   find the newest checkpoint ─ backend.start ─ load it ─▶ step c, which is also the version of the weights;
               only then is the process ready, unless the backend waits for a slice (``is_shared``)
    then       RegisterService(trainer) ─ find the weight server ─ publish version c, unless it holds c or newer

    for step s = c, c+1, …
      OpenStep(s) ───────────────▶ scheduler
      GrantGroups* (any order) ◀── scheduler     each window of groups (``consumption``): accumulate its micro-batches
      EarlySamples* ◀───────────── scheduler     with a KL term, while no window is whole: scored by the reference model
      StepGranted ◀──────────────── scheduler     nothing more will come: accumulate the rest; or no such step: end
      backend.step                               or several, each of a minibatch: the weights are version s + 1 now
      Publish(s + 1) ─▶ weights    ┐ at the same time; generation waits for the first,
      CommitStep(s) ──▶ scheduler  ┘ the next step for the second
      Committed(stop, checkpoint)                checkpoint at s + 1 if asked or at the end; flushed beside step s + 1

    loop            waits for                        unblocked by
    one step        groups, in windows               GrantGroups, StepGranted; Down or silence open the step again
    publish         the previous version's Published the weight server, or a newer one (ServiceChanged)

A scheduler that was restarted, alone or with its process, has forgotten who trains and what is granted. So after a
Down, or when an ask has found another life in its place, the trainer introduces itself and opens its step again; the
groups that it has already trained must be granted unchanged (from the journal), or it starts again (GrantChanged).

Handlers only fill the inbox and set flags; everything that touches the backend happens in the one loop, so weights
never change under an export. Replayed steps are trained like any other: the samples are the same, bit for bit.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import TypeVar

import numpy as np

from actors.core.actor import Actor, handles
from actors.core.errors import RemoteError
from actors.core.message import Message
from actors.core.patience import ask_patiently
from actors.core.ref import ActorRef
from actors.core.registered import RegisteredActor
from actors.core.tenure import RenewLease
from actors.core.watch import Down
from actors.protocol.failures import Acknowledged, NotAccepted
from actors.protocol.groups import EarlySamples, GrantGroups
from actors.protocol.job_news import Trouble
from actors.protocol.services import RegisterService, ServiceChanged
from actors.protocol.steps import CommitStep, Committed, OpenStep, StepGranted
from actors.roles import RoleArgs
from actors.trainer.accounts import StepAccounts, consumed
from actors.trainer.backend import MicroBatch, StepResult, TrainBackend
from actors.trainer.batching import Inbox, split, tokens_of
from actors.trainer.bounded import bounded
from actors.trainer.checkpointer import Checkpointer
from actors.trainer.consumption import consumption
from actors.trainer.errors import CheckpointAstray, GrantChanged, TrainingDiverged
from actors.trainer.learning.reference import ReferenceScores
from actors.trainer.micro_batches import MicroBatches
from actors.trainer.publisher import Publisher
from actors.trainer.room import require_room_for_run
from actors.trainer.setup import backend_of, backend_spec, loss_spec
from actors.trainer.spans import SpanRecorder
from actors.trainer.updates import StepUpdates

M = TypeVar("M", bound=Message)


class Trainer(RegisteredActor):
    """Trains one job. ``step`` is the next step, and the version of the weights that the backend holds."""

    def __init__(self, args: RoleArgs, backend: TrainBackend | None = None) -> None:
        """``backend``: one to use instead of the job's kind."""
        self._args = args
        self._job = args.job_config
        self._backend = backend or backend_of(args, self._job)
        self._algorithm = self._job.algorithm
        self._loss = loss_spec(self._job)
        self._run_dir = Path(args.run_dir)
        self._inbox: Inbox | None = None
        self._news = asyncio.Event()
        self._reference = ReferenceScores(self._score_reference, budget_tokens=self._job.trainer.pass_tokens)
        self._weights_moved = False
        self._completed = False
        self._skipped_in_a_row = 0
        self._step_began_s = 0.0
        self._tokens_before = 0
        self.step = self._resumed_step = 0
        self.ignored_grants = 0

    async def on_start(self) -> None:
        ctx, args = self.ctx, self._args
        self.obey(args.scheduler, ctx.limits.trainer_patience_s)
        self._spans = SpanRecorder(
            ctx, job=self._job.name, track=args.name, metrics=lambda: self.scheduler.beside(args.metrics)
        )
        self._backend = bounded(self._backend, ctx.limits)
        self._backend.connect(ctx)
        self._passes = MicroBatches(ctx, self._job, self._run_dir, self._backend, self._tell_trouble)
        self._updates = StepUpdates(self._job, self._backend, self._reference, self._passes, self._spans)
        self._publisher = Publisher(
            ctx, self._backend, self._spans, job=self._job.name, run_dir=self._run_dir, scheduler=self.scheduler
        )
        self._checkpointer = Checkpointer(
            ctx, self._backend, self._spans, self._job, self._run_dir, self._ask, self._tell_trouble
        )
        if not self._backend.is_shared:
            await self._begin()
        ctx.start_task(self._run(), "train")

    async def _begin(self) -> None:
        """Start the backend with the state from which training goes on."""
        args, backend = self._args, self._backend
        found = await self._checkpointer.find(args.resume_from)
        kept_step = await backend.start(backend_spec(args, self._job), checkpoint_step=found.step)
        await self.ctx.run_blocking(require_room_for_run, self._job, self._run_dir, backend.stored_bytes())
        if kept_step is None:
            await self._checkpointer.load(found)
        await self._passes.open(self._loss)
        self.step = self._resumed_step = found.step if kept_step is None else kept_step

    async def on_stop(self) -> None:
        await self._backend.close(keep=not self._completed)

    # ------------------------------------------------------------ messages

    @handles(GrantGroups)
    async def grant_groups(self, message: GrantGroups) -> None:
        """Add groups to the step. Duplicates and other steps' groups, as after opening twice, are only counted."""
        for group in split(message):
            if self._inbox is None or not self._inbox.add(group):
                self.ignored_grants += 1
            else:
                self._news.set()

    @handles(EarlySamples)
    async def early_samples(self, message: EarlySamples) -> None:
        if self._reference.offer(message):
            self._news.set()

    @handles(StepGranted)
    async def step_granted(self, message: StepGranted) -> None:
        if self._inbox is not None and self._inbox.step == message.step:
            self._inbox.close(message.groups, never=message.never)
            self._news.set()

    @handles(ServiceChanged)
    async def service_changed(self, message: ServiceChanged) -> None:
        if message.role == "weights":
            self._publisher.server_changed(message.address)
            self._weights_moved = True
            self._news.set()

    @handles(Down)
    async def down(self, message: Down) -> None:
        self._backend.heard(message)
        await super().down(message)

    def scheduler_lost(self, message: Down) -> None:
        """Wake the loop: between two micro-batches it tells the next scheduler who trains and which step is open."""
        self._news.set()

    def lease_lapsed(self) -> None:
        """Publish nothing, after being cut off for too long, until the scheduler has confirmed that we train."""
        self.ctx.log.warning("the lease has lapsed; nothing is published until it is granted anew")
        self.known_to = None
        self._news.set()

    # ------------------------------------------------------------ the loop

    async def _run(self) -> None:
        if self._backend.is_shared:  # its slice may come long after this process is ready
            await self._begin()
        await self.register()
        await self._publisher.find_server()
        self._weights_moved = False
        await self._publisher.sync(self.step)
        finished = self.step >= self._job.steps
        if finished:
            await self._checkpointer.write(self.step, final=True)
        while not finished:
            finished = await self._train_step()
        await self._publisher.settle()
        await self._checkpointer.settle()
        self._spans.flush()
        self._completed = True
        self.ctx.stop("completed")

    async def _train_step(self) -> bool:
        """Train one step, from OpenStep to Committed; True if it was the last."""
        self._step_began_s = self.ctx.now()
        accounts = StepAccounts(has_reference=self._algorithm.kl_coefficient > 0)
        self._updates.begin(self.step)
        inbox = await self._open()
        while not inbox.exhausted:
            windows = inbox.ready()
            for window in windows:
                await self._updates.accumulate(window, step=self.step)
            if not windows and not inbox.exhausted and not await self._score_early(inbox):
                await self._wait(inbox, accounts)
        if inbox.never:
            await self._checkpointer.write(self.step, final=True)
            return True
        result = await self._updates.update(inbox.groups, accounts, step=self.step)
        self._check_finite(result)
        self.step += 1
        self._tokens_before = tokens_of(inbox.groups.values())
        await self._may_publish()
        began_s = self.ctx.now()
        await self._publisher.publish(self.step)
        accounts.published_s = self.ctx.now() - began_s
        committed = await self._commit(inbox, accounts, result)
        self._backend.committed(self.step)
        if committed.checkpoint or committed.stop:
            await self._checkpointer.write(self.step, final=committed.stop, spared=committed.spared)
        self._spans.flush()
        return committed.stop

    async def _open(self) -> Inbox:
        job, step = self._job, self.step
        per_step = job.algorithm.prompts_per_step
        expected = range(step * per_step, (step + 1) * per_step)
        if job.algorithm.filter == "spread":  # the step's prompts are known once it is granted
            expected = range(0)
        self._reference.begin(step)
        plan = consumption(job, self._tokens_before, pass_tokens=self._passes.pass_tokens)
        self._inbox = Inbox(step=step, expected=expected, plan=plan)
        if not self.is_registered:
            await self.register()
        await self._ask_open(self._inbox)
        return self._inbox

    async def _ask_open(self, inbox: Inbox) -> None:
        """Ask the scheduler to grant all of the step, which voids earlier grants of it.

        A scheduler whose frontier is older refuses. That raises RemoteError and ends the trainer, whose next life
        starts from the newest checkpoint. If this life has just started from it, the next one would be refused as
        well, so it raises CheckpointAstray.
        """
        opened = OpenStep(job=self._job.name, step=inbox.step, trainer=self.ctx.self_address)
        try:
            await self._ask(opened, Acknowledged)
        except RemoteError as error:
            if isinstance(error.raised, NotAccepted) and inbox.step == self._resumed_step:
                raise CheckpointAstray(self._run_dir, inbox.step, error.detail) from error
            raise

    async def _wait(self, inbox: Inbox, accounts: StepAccounts) -> None:
        """Wait for a message. Silence, lost groups and a new scheduler make it open the step again."""
        began_s = self.ctx.now()
        with self._spans.span("wait", step=inbox.step, version=inbox.step, missing=inbox.missing):
            await self._next_news(inbox)
        accounts.waited_s += self.ctx.now() - began_s

    async def _next_news(self, inbox: Inbox) -> None:
        limits = self.ctx.limits
        silence_s = limits.backoff_max_s if inbox.has_lost_groups else limits.open_step_repeat_s
        try:
            async with asyncio.timeout(silence_s):
                await self._news.wait()
        except TimeoutError:
            self.ctx.log.warning("step without news, opened again", step=inbox.step, missing=inbox.missing)
            await self._ask_open(inbox)
        self._news.clear()
        if not self.is_registered:
            await self.register()
            await self._ask_open(inbox)
        if inbox.changed is not None:
            raise GrantChanged(f"step {inbox.step}: prompt {inbox.changed} was trained with other samples")
        if self._weights_moved:
            self._weights_moved = False
            await self._may_publish()
            await self._publisher.sync(self.step)

    async def introduce(self, scheduler: ActorRef) -> None:
        """Tell the scheduler who trains; repeated when it has restarted."""
        asked_at_s = self.ctx.now()
        await scheduler.ask(
            RegisterService(job=self._job.name, role="trainer", address=self.ctx.self_address), Acknowledged
        )
        renewal = RenewLease(job=self._job.name, holder=self.ctx.self_address.name, lease=1)
        self.tenure.begin(scheduler, renewal, self.ctx.limits.lease_s, asked_at_s=asked_at_s)

    async def _may_publish(self) -> None:
        """Wait until the scheduler confirms that we train. If that fails, the process ends, as with any ask."""
        if not self.tenure.is_held:
            await self.register()

    async def _ask(self, message: Message, reply: type[M]) -> M:
        """Ask the scheduler, whichever life of it answers."""
        return await ask_patiently(self.ctx, lambda: self.scheduler.address, message, reply, renew=self.scheduler.find)

    def _tell_trouble(self, kind: str, text: str) -> None:
        """Report a problem, which the scheduler passes on to people."""
        self.ctx.ref(self.scheduler.address).tell(Trouble(job=self._job.name, kind=kind, text=text))

    # ------------------------------------------------------------ training

    async def _score_early(self, inbox: Inbox) -> bool:
        """Score one micro-batch by the reference model instead of waiting. False: there is nothing to score."""
        if not self._reference.has_waiting:
            return False
        with self._spans.span("score", step=inbox.step, version=inbox.step):
            await self._updates.score_early(step=inbox.step)
        return True

    async def _score_reference(self, batch: MicroBatch) -> np.ndarray:
        return await self._passes.score(batch, temperature=self._loss.temperature, reference=True)

    def _check_finite(self, result: StepResult) -> None:
        self._skipped_in_a_row = self._skipped_in_a_row + 1 if result.skipped else 0
        if result.skipped:
            self.ctx.log.warning("non-finite gradient, update skipped", step=self.step)
        if self._skipped_in_a_row >= self.ctx.limits.diverged_steps:
            raise TrainingDiverged(
                f"{self._skipped_in_a_row} steps in a row up to step {self.step} had a non-finite gradient; "
                "lower trainer.lr, or look at the rewards"
            )

    async def _commit(self, inbox: Inbox, accounts: StepAccounts, result: StepResult) -> Committed:
        groups = inbox.groups.values()
        seconds = self.ctx.now() - self._step_began_s
        prompts, siblings = consumed(groups)
        metrics = accounts.metrics(groups, result, step=inbox.step, seconds=seconds)
        metrics["grants_ignored"] = float(self.ignored_grants)
        metrics |= self._passes.metrics
        metrics["tokens_scored_early"] = float(self._reference.scored_early_tokens)
        if self._algorithm.has_critic:
            alone = inbox.step < self._job.critic.warmup_steps
            metrics |= accounts.critic_metrics(result, alone=alone)
        metrics |= self._updates.taken_metrics()
        if not self._algorithm.compares_siblings:  # equal rewards teach, too
            metrics["degenerate_fraction"] = 0.0
        metrics |= self._backend.taken_metrics()
        commit = CommitStep(
            job=self._job.name,
            step=inbox.step,
            trainer=self.ctx.self_address,
            prompts=prompts,
            siblings=siblings,
            policy_version=self.step,
            metrics=metrics,
        )
        while True:
            try:
                return await self._ask(commit, Committed)
            except RemoteError as error:
                if self.is_registered or not error.declared:
                    raise
                self.ctx.log.info("a new scheduler has to grant the step again", step=inbox.step, why=error.detail)
            await self._granted_again(inbox)

    async def _granted_again(self, inbox: Inbox) -> None:
        """Have a restarted scheduler grant the trained groups once more, so that the step can be committed."""
        inbox.reopen()
        self._news.set()
        while not inbox.complete:
            await self._next_news(inbox)


def build(args: RoleArgs) -> dict[str, Actor]:
    return {args.name: Trainer(args)}
