"""A step's samples become updates of the weights: one, or one for each minibatch of each epoch.

    one update       window ─ prepared ─ cut ─▶ accumulate*      …      ─▶ step
    several          the whole step ─ prepared, held ─ parts of it by prompt ─▶ ( accumulate* ─▶ step )*

``prepared``: with what is asked of the weights before the step, which are scores of the reference and of the policy,
and of rules that whiten the advantages of tokens.

Invariants
- Parts are runs of prompts in order, so what an update is follows from the step's samples, whatever came first.
- A step has the same number of updates whatever was dropped: one of an empty part has a gradient of 0.
- Each update divides by its own part's size.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping

import numpy as np

from actors.protocol.groups import GroupGrant
from actors.trainer.accounts import StepAccounts, shape_of
from actors.trainer.agreement import EngineAgreement
from actors.trainer.backend import MicroBatch, StepResult, TrainBackend
from actors.trainer.batching import TrainSample, cut, group_samples
from actors.trainer.old_logprobs import with_old_logprobs
from actors.trainer.reference import ReferenceScores
from actors.trainer.rules import LearningRule
from actors.trainer.setup import loss_spec
from actors.trainer.spans import SpanRecorder
from actors.trainer.step_estimates import StepEstimates
from configs.schema import JobConfig


class StepUpdates:
    """Drives the backend through a job's steps."""

    def __init__(
        self,
        job: JobConfig,
        backend: TrainBackend,
        reference: ReferenceScores,
        agreement: EngineAgreement,
        spans: SpanRecorder,
    ) -> None:
        self._job, self._algorithm = job, job.algorithm
        self._backend, self._reference, self._agreement, self._spans = backend, reference, agreement, spans
        self._rule = LearningRule(job.algorithm, job.rollout.max_tokens)
        self._loss = loss_spec(job)
        self._estimates = StepEstimates(job, backend) if job.algorithm.whitens else None
        self._held: list[TrainSample] = []
        """Samples of this step, where it has several updates."""

    def taken_metrics(self) -> dict[str, float]:
        """Columns of the step's row that its estimates give, once."""
        return {} if self._estimates is None else self._estimates.taken_metrics()

    async def accumulate(self, window: list[GroupGrant], accounts: StepAccounts, *, step: int) -> None:
        """Add a window to the gradient sums; in a step of several updates, make it ready for them."""
        bound = self._job.staleness
        samples = [s for group in window for s in group_samples(group, self._rule, max_staleness=bound)]
        with self._spans.span("train", step=step, version=step, samples=len(samples)):
            samples = await self._prepared(samples)
            if self._algorithm.updates > 1:
                self._held += samples
                return
            for batch in self._cut(samples):
                stats = await self._backend.accumulate(batch, self._loss)
                self._agreement.look(batch, stats, step=step)
                accounts.add(stats)

    async def _prepared(self, samples: list[TrainSample]) -> list[TrainSample]:
        """With all that is asked of the weights before the step."""
        algorithm = self._algorithm
        with_kl = algorithm.kl_coefficient > 0
        if with_kl:
            samples = await self._reference.scored(samples)
        if algorithm.updates > 1 or (with_kl and algorithm.kl_in_rewards):
            budget = self._job.trainer.pass_tokens
            samples = await with_old_logprobs(samples, self._score_policy, budget_tokens=budget)
        if self._estimates is not None:
            samples = await self._estimates.estimated(samples)
        if algorithm.updates == 1:  # the one update computes them itself
            samples = [dataclasses.replace(sample, old_logprobs=None) for sample in samples]
        return samples

    def _cut(self, samples: Iterable[TrainSample]) -> list[MicroBatch]:
        algorithm = self._algorithm
        keep_zero = algorithm.kl_coefficient > 0 or algorithm.entropy_coefficient > 0 or algorithm.loss is not None
        keep_zero = keep_zero or self._estimates is not None
        return cut(samples, budget_tokens=self._job.trainer.pass_tokens, keep_zero=keep_zero)

    async def update(self, groups: Mapping[int, GroupGrant], accounts: StepAccounts, *, step: int) -> StepResult:
        """Step, once or for each minibatch of each epoch. Minibatches are runs of prompts, whatever came first."""
        algorithm, limit = self._algorithm, self._job.rollout.max_tokens
        if algorithm.updates == 1:
            return await self._step(self._rule.normaliser(shape_of(groups.values(), limit)), accounts)
        held, self._held = self._held, []
        parts = [set(part.tolist()) for part in np.array_split(np.array(sorted(groups)), algorithm.minibatches)]
        batches = [self._cut(sample for sample in held if sample.prompt in part) for part in parts]
        weights = [self._rule.normaliser(shape_of((groups[prompt] for prompt in part), limit)) for part in parts]
        results: list[StepResult] = []
        for epoch in range(algorithm.epochs):
            for minibatch, weight in zip(batches, weights, strict=True):
                rows = sum(len(batch.lengths) for batch in minibatch)
                with self._spans.span("train", step=step, version=step, samples=rows):
                    for batch in minibatch:
                        stats = await self._backend.accumulate(batch, self._loss)
                        if not results:
                            self._agreement.look(batch, stats, step=step)
                        accounts.add(stats, again=epoch > 0)
                results.append(await self._step(weight, accounts, again=epoch > 0))
        return dataclasses.replace(results[-1], skipped=any(result.skipped for result in results))

    async def _step(self, weight: float, accounts: StepAccounts, *, again: bool = False) -> StepResult:
        result = await self._backend.step(weight=weight)
        if not again:
            accounts.updated(weight)
        return result

    async def _score_policy(self, batch: MicroBatch) -> np.ndarray:
        return await self._backend.score(batch, temperature=self._loss.temperature, reference=False)
