"""Makes a step's plan: worker table, expected lengths, the job's rule ─▶ PlanView ─▶ policies.step_plan.

length of a response   that of the prompt in the newest training epoch ─ unknown ─▶ from its hint (``LengthHints``)
workers                beside the trainer, then those awake, then the nearest, then functions that do not exist yet
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

import numpy as np

from actors.fleet.length_ranking import LengthRanking
from actors.fleet.modes.rests import EngineRests
from actors.fleet.scope import JobScope
from actors.fleet.workers import Worker
from actors.ledger.batch import SampleState, StepBatch
from actors.policies.assigning.latency_table import EMPTY
from actors.policies.lengths.length_predictor import LengthHints, PromptsView, mean_lengths
from actors.policies.planning import step_plan
from actors.policies.planning.bill import BillingRule
from actors.policies.planning.step_plan import PlanRule, PlanView, PlanWorker, StepPlan
from actors.protocol.batches import IssueBatch

SLOTS_EXPECTED: Final = 64
"""Samples that an engine of unknown size is expected to run together."""


@dataclass(frozen=True, slots=True)
class Planning:
    """A planning is a plan with the prompts and functions that it refers to."""

    plan: StepPlan
    prompts: np.ndarray
    """Positions in the batch of the planned prompts."""
    new: dict[str, float]
    """Functions of the plan that do not exist yet → seconds until they should be ready."""


@dataclass(slots=True)
class StepPlanner:
    """The planner plans the steps of one job, and learns from them."""

    scope: JobScope
    ranking: LengthRanking
    rests: EngineRests
    transfer_s: dict[str, float] = field(default_factory=dict[str, float])
    """Worker → seconds that it took to pull and load its newest version."""
    cold_s: float = 0.0
    """Seconds that starting a function took last."""
    _hints: LengthHints = field(default_factory=LengthHints)
    _answers: dict[int, np.ndarray] = field(default_factory=dict[int, np.ndarray])
    """Step → lengths of its reference answers, -1 where there is none."""

    @property
    def starts_functions(self) -> bool:
        """Whether the provider can start more workers than there are."""
        return self.scope.job.provider.kind == "functions"

    def plan(self, batch: StepBatch, workers: list[Worker], now: float) -> Planning:
        """Plan the queued samples of ``batch``."""
        job = self.scope.job
        queued = np.flatnonzero(batch.state == SampleState.QUEUED) // batch.group_size
        prompts, siblings = np.unique(queued, return_counts=True)
        found = [self._worker(worker, batch.step) for worker in sorted(workers, key=self._first_taken)]
        most = job.scheduling.workers_max or len(found)
        new = [self._function(i, workers) for i in range(len(found), most)] if self.starts_functions else []
        rule = job.scheduling.plan
        view = PlanView(
            workers=[*found, *new],
            expected_tokens=self._expected(batch, prompts),
            siblings=siblings.astype(np.int32),
            prompt_tokens=_prompt_tokens(batch)[prompts],
            workers_min=min(job.scheduling.workers_min, len(found) + len(new)),
            workers_max=min(most, len(found) + len(new)),
            max_tokens=batch.sampling.max_tokens,
            rule=PlanRule(rule.choose, rule.time_weight, rule.within, rule.parts),
            bill=self._bill(),
        )
        plan = step_plan.decide(view, now)
        return Planning(plan, prompts, {one.name: self.cold_s for one in new if one.name in plan.parts})

    def _first_taken(self, worker: Worker) -> tuple[bool, bool, float, str]:
        return (
            not self.rests.of(worker).beside_trainer,
            worker.off_duty,
            self.transfer_s.get(worker.name, 0.0),
            worker.name,
        )

    def _worker(self, worker: Worker, version: int) -> PlanWorker:
        rest = self.rests.of(worker)
        return PlanWorker(
            worker.name,
            worker.runs,
            worker.latency.table,
            ready_in_s=rest.wakes_s if worker.off_duty else 0.0,
            transfer_s=self.transfer_s.get(worker.name, 0.0) if worker.policy_version < version else 0.0,
            beside_trainer=rest.beside_trainer,
        )

    def _bill(self) -> BillingRule:
        """The billing rule of the provider; own workers cost nothing while asleep, since others can use the machine."""
        provider = self.scope.job.provider
        if not self.starts_functions:
            return BillingRule(asleep_price=0.0)
        return BillingRule(provider.bill_rounding_s, provider.asleep_price)

    def _function(self, number: int, workers: list[Worker]) -> PlanWorker:
        """A function that does not exist yet; one that sizes itself is expected to be as large as the largest here."""
        configured = self.scope.job.rollout.max_running
        known = [worker.slots for worker in workers if worker.engine == self.scope.job.rollout.engine]
        slots = max(known, default=SLOTS_EXPECTED) if configured == "auto" else configured
        return PlanWorker(f"new function {number}", slots, EMPTY, ready_in_s=self.cold_s, exists=False)

    def _expected(self, batch: StepBatch, prompts: np.ndarray) -> np.ndarray:
        known = self.ranking.expected(batch, prompts)
        return np.where(np.isfinite(known), known, self._hints.expected(self._hints_of(batch)[prompts]))

    def _hints_of(self, batch: StepBatch) -> np.ndarray:
        """int32[p] lengths of the reference answers, or of the prompts where there is no answer."""
        prompts, answers = _prompt_tokens(batch), self._answers.get(batch.step)
        return prompts if answers is None else np.where(answers >= 0, answers, prompts)

    def issued(self, batch: IssueBatch) -> None:
        """Note how long the reference answers of a step are; a new life of the scheduler does not know them."""
        self._answers[batch.step] = np.array([prompt.answer_tokens for prompt in batch.prompts], np.int32)

    def committed(self, batch: StepBatch) -> None:
        """Learn how long the responses of a committed batch were."""
        states, lengths = (column.reshape(-1, batch.group_size) for column in (batch.state, batch.length))
        finished = (states >= SampleState.FINISHED) & (states != SampleState.DROPPED)
        seen = PromptsView(np.empty(0, np.uint64), lengths, finished)
        self._hints.observe(self._hints_of(batch), mean_lengths(seen))
        self._answers.pop(batch.step, None)


def _prompt_tokens(batch: StepBatch) -> np.ndarray:
    return np.array([len(ids) for ids in batch.prompt_ids], np.int32)
