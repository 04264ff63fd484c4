"""Brings the prompts of each step to the scheduler, portion by portion, and tells people what is wrong with the data.

    NeedBatch ─▶ ReadPrompts ─▶ PromptsRead: some of them, or how far the search is ─▶ ReadPrompts for the rest ─▶ …
                     │            └ all ─▶ IssueBatch ─▶ done                fewer, and there are no more ─▶ DataEnded
                     ├ failed: after a pause, again; for longer than a few seconds: ``waits`` says so
                     └ failed for good: DataEnded with the reason; the steps before it are the job's last, and it failed

Invariants
- Every question is answered within a few seconds, so that people see progress in a long search for rows that fit.
- Reading is repeatable and issuing idempotent: both are tried again, unless the error is ``permanent``.
- People are told of the first rows that are passed over, and again whenever their number has doubled.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
from typing import Protocol

import msgspec

from actors.core.context import Context
from actors.core.errors import AskError, RemoteError
from actors.core.patience import Patience
from actors.core.ref import ActorRef
from actors.protocol.batches import BatchIssued, DataEnded, IssueBatch
from actors.protocol.episodes import EpisodeLimits
from actors.protocol.evaluations import GiveUpEvaluation, evaluation_step, is_evaluation, name_of_batch, version_of
from actors.protocol.failures import Acknowledged
from actors.protocol.job_news import NeedBatch
from actors.protocol.rewards import PromptsRead, ReadPrompts, SourcedPrompt
from actors.protocol.services import LookupService, ServiceFound
from actors.protocol.work import SamplingParams
from configs.schema import JobConfig
from transport.address import ActorAddress
from transport.errors import HeadraceError


class Owner(Protocol):
    """Stands for the part of the job that issuing needs."""

    @property
    def over(self) -> bool:
        """Whether nothing more is to be done."""
        ...

    def event(self, name: str, message: str = "", **fields: float | str) -> None:
        """Record an event; the message is for people."""
        ...

    def waits(self, what: str) -> None:
        """Say what the next batch waits for; empty: for nothing."""
        ...

    def fail(self, reason: str) -> None:
        """Let the job fail, before its first step."""
        ...


class Issuing:
    """Issues the batches of one job."""

    def __init__(
        self, context: Context, config: JobConfig, owner: Owner, scheduler: ActorRef, stop_token_ids: tuple[int, ...]
    ) -> None:
        self._ctx, self._config, self._owner, self._scheduler = context, config, owner, scheduler
        self._sampling = SamplingParams(
            max_tokens=config.rollout.max_tokens,
            temperature=config.rollout.temperature,
            stop_token_ids=stop_token_ids,
            seed=config.seed,
        )
        drawn = config.evaluation.rollout
        self._evaluation_sampling = SamplingParams(
            max_tokens=drawn.max_tokens,
            temperature=drawn.temperature,
            top_p=1.0 if config.eval is None else config.eval.top_p,
            stop_token_ids=stop_token_ids,
            seed=config.evaluation.seed,
        )
        self._issuing: set[tuple[int, int]] = set()
        self._asked_again = asyncio.Event()
        """Event: the scheduler has asked again, as the prompt source has changed; ends the pause before a retry."""
        self._told_unreadable: set[int] = set()
        self._told_overlap = False
        self._told_passed = {"": 0, " of eval.data": 0}
        """Numbers of rows passed over, as people were last told: of the training data, and of the evaluation's."""
        self._told_replaced = False
        self._told_once = config.scheduling.policy != "planned"

    def need(self, order: NeedBatch) -> None:
        """Issue what the scheduler asks for: a batch, more prompts for one, or the batch of an evaluation."""
        key = (order.step, order.start)
        if key in self._issuing:
            self._asked_again.set()
        else:
            self._issuing.add(key)
            self._ctx.start_task(self._issue(order, key), f"issue {name_of_batch(order.step)} from {order.start}")

    async def _issue(self, order: NeedBatch, key: tuple[int, int]) -> None:
        step = order.step
        limits = self._config.limits
        patience, failing_since = Patience(limits, self._ctx.rng("patience")), math.inf
        try:
            while not self._owner.over:
                why, grace_s = "a prompt source: none has registered", limits.first_service_s
                try:
                    if await self._try(order):
                        return
                except AskError as error:
                    self._ctx.log.warning("a batch is not issued yet; trying again", step=step, error=str(error))
                    why, grace_s = f"the prompts of {name_of_batch(step)}: {_cause(error)}", limits.stall_report_s
                failing_since = min(failing_since, self._ctx.now())
                if self._ctx.now() - failing_since >= grace_s:
                    self._owner.waits(why)
                await self._until_asked_again(patience.pause_s())
        finally:
            self._issuing.discard(key)
            self._owner.waits("")

    async def _until_asked_again(self, at_most_s: float) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(at_most_s):
                await self._asked_again.wait()
        self._asked_again.clear()

    async def _try(self, order: NeedBatch) -> bool:
        """Issue what was ordered; False if no prompt source has registered yet.

        Raises:
            AskError: an ask failed in a way that is worth another try.
        """
        config, step, per_step = self._config, order.step, self._config.algorithm.prompts_per_step
        count, start = order.count or per_step, order.start if order.start >= 0 else step * per_step
        found = await self._scheduler.ask(LookupService(job=config.name, role="prompts"), ServiceFound)
        if found.address is None:
            return False
        try:
            if is_evaluation(step):
                await self._evaluate(step, found.address)
                return True
            prompts = await self._read(ReadPrompts(job=config.name, start=start, count=count), found.address)
            if len(prompts) == count or (prompts and order.more):
                await self._scheduler.ask(self._batch(step, prompts), BatchIssued)
            if len(prompts) == count:
                return True
        except HeadraceError as error:
            if not error.permanent:
                raise
            await self._unreadable(step + order.more, error)
            return True
        step += order.more
        self._owner.event("data_ended", step=step)
        few = f"data: fewer than algorithm.prompts_per_step={count} prompts; add data or lower it"
        await self._no_more(step, "", few)
        return True

    async def _evaluate(self, step: int, source: ActorAddress) -> None:
        """Issue all prompts of an evaluation; if it has none, it is given up."""
        config = self._config.eval
        assert config is not None, "only a job with an evaluation is asked for one"
        count = config.prompts or self._config.limits.evaluation_prompts
        wanted = ReadPrompts(job=self._config.name, start=0, count=count, evaluation=True)
        prompts = await self._read(wanted, source)
        if prompts:
            await self._scheduler.ask(self._batch(step, prompts), BatchIssued)
        else:
            await self._no_more(step, "", "eval.data: no prompt in it can be used; add some, or leave eval out")

    def _batch(self, step: int, prompts: list[SourcedPrompt]) -> IssueBatch:
        config = self._config.eval if is_evaluation(step) else None
        return IssueBatch(
            job=self._config.name,
            step=step,
            group_size=self._config.algorithm.group_size if config is None else config.samples,
            sampling=self._sampling if config is None else self._evaluation_sampling,
            prompts=prompts,
            episodes=_episode_limits(self._config if config is None else self._config.evaluation),
        )

    async def _unreadable(self, step: int, error: HeadraceError) -> None:
        """Tell people and the scheduler that the prompts of ``step`` will never come."""
        why = f"the prompts of {name_of_batch(step)} cannot be read: {_cause(error)}"
        if step not in self._told_unreadable:
            self._told_unreadable.add(step)
            self._ctx.log.error("the job ends for want of prompts", step=step, why=why)
            said_now = why if step > 0 else ""  # else the job fails at once, or the scheduler tells people
            self._owner.event("prompts_unreadable", said_now, step=step, why=why)
        await self._no_more(step, why, why)

    async def _no_more(self, step: int, failed: str, why_none: str) -> None:
        """End the job with the step before ``step``; if there is none it fails, for the reason ``why_none``.

        It fails too if its first evaluation has no prompts; a later evaluation is given up.
        """
        if step in (0, evaluation_step(0)):
            self._owner.fail(why_none)
        elif is_evaluation(step):
            order = GiveUpEvaluation(job=self._config.name, version=version_of(step), why=why_none)
            await self._scheduler.ask(order, Acknowledged)
        else:
            await self._scheduler.ask(DataEnded(job=self._config.name, step=step, failed=failed), Acknowledged)

    # ------------------------------------------------------------ reading

    async def _read(self, wanted: ReadPrompts, source: ActorAddress) -> list[SourcedPrompt]:
        """The prompts that are wanted; fewer if the data end."""
        limits, found = self._config.limits, list[SourcedPrompt]()
        patience_s = limits.read_timeout_s + limits.ask_timeout_s  # the prompt source gives up first, and says why
        count, told_s = wanted.count, self._ctx.now()
        while len(found) < count:
            question = msgspec.structs.replace(wanted, start=wanted.start + len(found), count=count - len(found))
            read = await self._ctx.ref(source).ask(question, PromptsRead, patience_s)
            found += read.prompts
            if wanted.evaluation:
                self._tell_of_overlap(read)
                self._tell_of_passed(read, " of eval.data")
            else:
                self._tell_of(read)
            if read.exhausted:
                break
            if len(found) < count and self._ctx.now() - told_s >= limits.stall_report_s:
                self._owner.waits(_progress(read, len(found), count))
                told_s = self._ctx.now()
        return found

    def _tell_of_overlap(self, read: PromptsRead) -> None:
        if read.overlap and not self._told_overlap:
            self._told_overlap = True
            message = (
                f"warning: {read.overlap} prompts of eval.data are prompts of the training data, too: what is measured "
                "on them is not held out. Take them out of one of the two"
            )
            self._owner.event("evaluation_overlaps", message, prompts=read.overlap)

    def _tell_of(self, read: PromptsRead) -> None:
        if read.replaced and not self._told_replaced:
            self._told_replaced = True
            message = "data.path holds other data than when the run began: prompts from here on are from the new ones"
            self._owner.event("data_replaced", message, rows=read.rows)
        needed = self._config.steps * self._config.algorithm.prompts_per_step
        if read.rows >= needed and not self._told_once:
            message = (
                f"no prompt of the {read.rows:,} comes twice in {self._config.steps} steps: plans go by the lengths of "
                "reference answers or prompts, as the history of earlier epochs stays empty"
            )
            self._owner.event("lengths_without_history", message, rows=read.rows, needed=needed)
        self._told_once = self._told_once or bool(read.rows)
        self._tell_of_passed(read, "")

    def _tell_of_passed(self, read: PromptsRead, of: str) -> None:
        passed = sum(read.passed.values())
        if passed >= max(1, 2 * self._told_passed[of]):
            self._told_passed[of] = passed
            why = "; ".join(
                f"{count:,} {reason}, first {read.first.get(reason, '?')}" for reason, count in read.passed.items()
            )
            message = f"prompts{of} passed over: {passed:,} of {read.seen:,} rows looked at so far ({why})"
            self._owner.event("prompts_passed_over", message, passed=passed, seen=read.seen, rows=read.rows, why=why)


def _episode_limits(config: JobConfig) -> EpisodeLimits | None:
    if not config.has_episodes:
        return None
    environment, most = config.environment, config.rollout.max_tokens
    return EpisodeLimits(environment.turns_max, environment.turn_tokens or most, config.episode_tokens)


def _progress(read: PromptsRead, found: int, count: int) -> str:
    if read.checked < read.rows:
        return f"a first look at all rows: {read.checked:,} of {read.rows:,}"
    return f"prompts that fit: {found} of {count} found, {read.seen:,} of {read.rows:,} rows looked at"


def _cause(error: HeadraceError) -> str:
    """The error's text; of a remote error, what the other side wrote, without the names of asker and target."""
    return error.detail if isinstance(error, RemoteError) else str(error)
