"""A step's samples become updates of the weights: one, or one for each minibatch of each epoch.

    one update       window ─ prepared ─ cut ─▶ accumulate*      …      ─▶ step
    several          the whole step ─ prepared, held ─ parts of it by prompt ─▶ ( accumulate* ─▶ step )*

``prepared``: with all that depends on the weights before the step: scores of the reference and of the policy, and, if
the rule whitens, the tokens' advantages.

    OutOfMemory      half the size, sums dropped ─▶ all windows so far, or the present part, once more

Invariants
- What failed for lack of memory leaves nothing: its update is computed anew from sums of zero, and counted once.
- Parts are runs of prompts in order, so what an update is follows from the step's samples, whatever came first.
- A step has the same number of updates whatever was dropped: an empty part's update has a gradient of 0.
- Each update divides by its own part's size.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from functools import partial

import numpy as np

from actors.protocol.groups import GroupGrant
from actors.trainer.accounts import StepAccounts, shape_of
from actors.trainer.backend import MicroBatch, MicroBatchStats, StepResult, TrainBackend, summed
from actors.trainer.errors import EngineDisagrees, OutOfMemory
from actors.trainer.learning.reference import ReferenceScores
from actors.trainer.learning.rules import LearningRule
from actors.trainer.learning.samples import TrainSample, cut, group_samples, pad, portions
from actors.trainer.learning.step_estimates import StepEstimates
from actors.trainer.micro_batches import MicroBatches
from actors.trainer.setup import loss_spec
from actors.trainer.spans import SpanRecorder
from configs.schema import JobConfig


class StepUpdates:
    """Drives the backend through a job's steps."""

    def __init__(
        self,
        job: JobConfig,
        backend: TrainBackend,
        reference: ReferenceScores,
        passes: MicroBatches,
        spans: SpanRecorder,
    ) -> None:
        self._job, self._algorithm = job, job.algorithm
        self._backend, self._reference, self._passes, self._spans = backend, reference, passes, spans
        self._agreement = EngineAgreement(job, backend.kind)
        self._rule = LearningRule(job.algorithm, job.rollout.max_tokens)
        self._loss = loss_spec(job)
        self._estimates = StepEstimates(job, passes.values) if job.algorithm.whitens else None
        self._held: list[TrainSample] = []
        """Samples of this step, kept if it has several updates."""
        self._windows: list[list[GroupGrant]] = []
        """Windows of this step that were accumulated."""
        self._stats: list[MicroBatchStats] = []
        """Statistics of the update under way, as far as the backend tells them before it steps."""

    def taken_metrics(self) -> dict[str, float]:
        """Columns of the step's row from its estimates, given once."""
        return {} if self._estimates is None else self._estimates.taken_metrics()

    def begin(self, step: int) -> None:
        """Begin a step; what is left of an unfinished one is forgotten."""
        self._windows.clear()
        self._forget()
        self._size_from(step, 0)

    def _size_from(self, step: int, update: int) -> None:
        """Take the size of micro-batches that holds from this update on."""
        self._passes.begin(step, update)
        self._reference.budget_tokens = self._passes.pass_tokens
        if self._estimates is not None:
            self._estimates.budget_tokens = self._passes.pass_tokens

    async def accumulate(self, window: list[GroupGrant], *, step: int) -> None:
        """Add a window to the gradient sums; in a step of several updates, only prepare and hold its samples."""
        self._windows.append(window)
        await self._fitting(lambda: self._add(window, step), lambda: self._add_all(step), step, 0)

    async def score_early(self, *, step: int) -> None:
        """Score some samples by the reference model, before their windows are whole."""
        await self._fitting(self._reference.score_some, lambda: self._add_all(step), step, 0)

    async def _fitting(
        self, work: Callable[[], Awaitable[None]], again: Callable[[], Awaitable[None]], step: int, update: int
    ) -> None:
        """Do ``work``; whenever memory runs out, do the whole update so far ``again`` in smaller micro-batches."""
        while True:
            try:
                return await work()
            except OutOfMemory as error:
                await self._passes.shrink(error)
            self._size_from(step, update)
            work = again

    async def _add_all(self, step: int) -> None:
        self._forget()
        self._reference.begin_again()
        for window in self._windows:
            await self._add(window, step)

    def _forget(self) -> None:
        self._held.clear()
        self._stats.clear()

    async def _add(self, window: list[GroupGrant], step: int) -> None:
        bound = self._job.staleness
        samples = [s for group in window for s in group_samples(group, self._rule, max_staleness=bound)]
        with self._spans.span("train", step=step, version=step, samples=len(samples)):
            samples = await self._prepared(samples)
            if self._algorithm.updates > 1:
                self._held += samples
                return
            await self._learn(self._cut(samples))

    async def _learn(self, batches: list[MicroBatch]) -> None:
        """Add micro-batches to the gradient sums."""
        for batch in batches:
            self._stats.append(await self._passes.accumulate(batch, self._loss))

    async def _prepared(self, samples: list[TrainSample]) -> list[TrainSample]:
        """The samples with everything that is computed from the weights before the step."""
        algorithm = self._algorithm
        with_kl = algorithm.kl_coefficient > 0
        if with_kl:
            samples = await self._reference.scored(samples)
        if algorithm.updates > 1 or (with_kl and algorithm.kl_in_rewards):
            budget = self._passes.pass_tokens
            samples = await with_old_logprobs(samples, self._score_policy, budget_tokens=budget)
        if self._estimates is not None:
            samples = await self._estimates.estimated(samples)
        if algorithm.updates == 1:  # the one update computes old log-probabilities itself
            samples = [dataclasses.replace(sample, old_logprobs=None) for sample in samples]
        return samples

    def _cut(self, samples: Iterable[TrainSample]) -> list[MicroBatch]:
        algorithm = self._algorithm
        keep_zero = algorithm.kl_coefficient > 0 or algorithm.entropy_coefficient > 0 or algorithm.loss is not None
        keep_zero = keep_zero or self._estimates is not None or bool(algorithm.load_balancing)
        return cut(samples, budget_tokens=self._passes.pass_tokens, keep_zero=keep_zero)

    async def update(self, groups: Mapping[int, GroupGrant], accounts: StepAccounts, *, step: int) -> StepResult:
        """Step, once or for each minibatch of each epoch. Minibatches are runs of prompts, whatever came first."""
        algorithm, limit = self._algorithm, self._job.rollout.max_tokens
        if algorithm.updates == 1:
            return await self._step(self._rule.normaliser(shape_of(groups.values(), limit)), accounts, step)
        parts = [set(part.tolist()) for part in np.array_split(np.array(sorted(groups)), algorithm.minibatches)]
        samples = [[sample for sample in self._held if sample.prompt in part] for part in parts]
        weights = [self._rule.normaliser(shape_of((groups[prompt] for prompt in part), limit)) for part in parts]
        results: list[StepResult] = []
        last_taught: StepResult | None = None
        for number in range(algorithm.epochs * len(parts)):
            epoch, part = divmod(number, len(parts))
            self._size_from(step, number)
            work = partial(self._learn_part, samples[part], step)
            await self._fitting(work, work, step, number)
            taught = len(self._stats) > 0
            results.append(await self._step(weights[part], accounts, step, number=number, again=epoch > 0))
            last_taught = results[-1] if taught else last_taught
        self._held.clear()
        return dataclasses.replace(last_taught or results[-1], skipped=any(result.skipped for result in results))

    async def _learn_part(self, samples: list[TrainSample], step: int) -> None:
        """Add the samples of one update to the gradient sums, which are those of no other update."""
        self._stats.clear()
        batches = self._cut(samples)
        rows = sum(len(batch.lengths) for batch in batches)
        with self._spans.span("train", step=step, version=step, samples=rows):
            await self._learn(batches)

    async def _step(
        self, weight: float, accounts: StepAccounts, step: int, *, number: int = 0, again: bool = False
    ) -> StepResult:
        """Update number ``number`` of the step; the first one's statistics are of the weights before the step."""
        result = await self._backend.step(weight=weight)
        stats = summed([*self._stats, result.stats])
        if number == 0:
            self._agreement.look(stats, step=step)
        accounts.add(stats, micro_batches=len(self._stats), again=again)
        self._stats.clear()
        if not again:
            accounts.updated(weight)
        return result

    async def _score_policy(self, batch: MicroBatch) -> np.ndarray:
        return await self._passes.score(batch, temperature=self._loss.temperature, reference=False)


async def with_old_logprobs(
    samples: Sequence[TrainSample], score: Callable[[MicroBatch], Awaitable[np.ndarray]], *, budget_tokens: int
) -> list[TrainSample]:
    """The samples that have a response, with log-probabilities of their tokens under the weights before the step.

    The engine's would do for a ratio, too, but a clip around them would bound numerics as well, and their last bits
    depend on which worker generated what: a run that lost a worker would end with other weights. A step of one update
    computes these log-probabilities anyway, and does not call this unless the KL is in the rewards.
    """
    answered = [sample for sample in samples if sample.tokens.size]
    found: dict[tuple[int, int, int], np.ndarray] = {}
    for part in portions(answered, budget_tokens=budget_tokens):
        scores = await score(pad(part))
        for sample, line in zip(part, scores, strict=True):
            found[sample.name] = line[sample.prompt_ids.size : sample.length].copy()
    return [dataclasses.replace(s, old_logprobs=found[s.name]) for s in answered]


class EngineAgreement:
    """Checks once, in the first step of each life, whether the engine samples the policy that is trained.

        generated by these very weights ─▶ mean |trainer - engine log-probability| ─▶ within the limit?

    Both are of the weights before the step, and tokens of older ones are left out, so that only rounding may differ.
    The check precedes the step's publication and commit. Simulated engines and backends are not compared: their
    figures are made up.
    """

    def __init__(self, job: JobConfig, backend: str) -> None:
        self._engine, self._dtype = job.rollout.engine, job.model.dtype
        if job.rollout.servers:
            self._engine += f", or a server of rollout.servers ({', '.join(job.rollout.servers)}),"
        limits = job.limits
        self._limit = limits.engine_mismatch if self._dtype == "float32" else limits.engine_mismatch_half
        self._over = backend == "simulated" or job.rollout.engine == "simulated"

    def look(self, stats: MicroBatchStats, *, step: int) -> None:
        """Compare the statistics of a step's first update, if none were compared yet.

        Raises:
            EngineDisagrees: the two are further apart than rounding explains.
        """
        tokens = stats.tokens - stats.older_tokens
        if self._over or not tokens:
            return
        self._over = True
        apart = (stats.mismatch_sum - stats.older_mismatch_sum) / tokens
        if apart <= self._limit:  # False for NaN
            return
        name = "engine_mismatch" if self._dtype == "float32" else "engine_mismatch_half"
        raise EngineDisagrees(
            f"trainer and engine compute different policies: in step {step} their log-probabilities of the same "
            f"{tokens} tokens, under the same weights, are {apart:.3g} apart on average; limits.{name} allows "
            f"{self._limit:g} for {self._dtype}. rollout.engine {self._engine} does not run this model as transformers "
            "does: try another engine, or engine_options: {decoder: generic} with torch"
        )
