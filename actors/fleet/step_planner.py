"""What a step's plan is made of: the worker table, expected lengths, the job's rule ─▶ PlanView ─▶ policies.step_plan.

length of a response   the prompt's in the newest epoch ─ unknown ─▶ from its hint (``policies.length_hints``)
workers                beside the trainer, then those awake, then the nearest, then functions that do not exist yet
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from actors.fleet.length_ranking import LengthRanking
from actors.fleet.scope import JobScope
from actors.fleet.workers import Worker
from actors.ledger.batch import SampleState, StepBatch
from actors.policies import step_plan
from actors.policies.bill import Rule
from actors.policies.latency_table import EMPTY
from actors.policies.length_hints import LengthHints
from actors.policies.length_predictor import PromptsView, mean_lengths
from actors.policies.step_plan import PlanRule, PlanView, PlanWorker, StepPlan
from actors.protocol.batches import IssueBatch


@dataclass(frozen=True, slots=True)
class Planning:
    """It is a plan, and what it is about."""

    plan: StepPlan
    prompts: np.ndarray
    """Positions in the batch of the prompts that were planned."""
    new: dict[str, float]
    """Functions of the plan that do not exist yet → seconds until they should be ready."""


@dataclass(slots=True)
class StepPlanner:
    """It plans the steps of one job, and learns from them."""

    scope: JobScope
    ranking: LengthRanking
    cold_s: float = 0.0
    """Seconds that starting a function took last."""
    _hints: LengthHints = field(default_factory=LengthHints)
    _answers: dict[int, np.ndarray] = field(default_factory=dict[int, np.ndarray])
    """Step → lengths of its reference answers, -1 where there is none."""

    @property
    def starts_functions(self) -> bool:
        """Whether more workers than there are can be had."""
        return self.scope.job.provider.kind == "functions"

    def plan(self, batch: StepBatch, workers: list[Worker], now: float) -> Planning:
        """Plan what is queued of ``batch``."""
        job = self.scope.job
        queued = np.flatnonzero(batch.state == SampleState.QUEUED) // batch.group_size
        prompts, siblings = np.unique(queued, return_counts=True)
        found = [_plan_worker(worker, batch.step) for worker in sorted(workers, key=_first_taken)]
        most = job.scheduling.workers_max or len(found)
        new = [self._function(i) for i in range(len(found), most)] if self.starts_functions else []
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

    def _bill(self) -> Rule:
        """One's own workers cost nothing while they sleep: what they run on is free for others."""
        provider = self.scope.job.provider
        return (
            Rule(provider.bill_rounding_s, provider.asleep_price) if self.starts_functions else Rule(asleep_price=0.0)
        )

    def _function(self, number: int) -> PlanWorker:
        slots = self.scope.job.rollout.max_running
        return PlanWorker(f"new function {number}", slots, EMPTY, ready_in_s=self.cold_s, exists=False)

    def _expected(self, batch: StepBatch, prompts: np.ndarray) -> np.ndarray:
        known = self.ranking.expected(batch, prompts)
        return np.where(np.isfinite(known), known, self._hints.expected(self._hints_of(batch)[prompts]))

    def _hints_of(self, batch: StepBatch) -> np.ndarray:
        """int32[p] lengths of the reference answers, of prompts where there is none."""
        prompts, answers = _prompt_tokens(batch), self._answers.get(batch.step)
        return prompts if answers is None else np.where(answers >= 0, answers, prompts)

    def issued(self, batch: IssueBatch) -> None:
        """Note how long the reference answers of a step are. A new life of the scheduler does without."""
        self._answers[batch.step] = np.array([prompt.answer_tokens for prompt in batch.prompts], np.int32)

    def committed(self, batch: StepBatch) -> None:
        """Learn how long the responses of a committed batch were."""
        states, lengths = (column.reshape(-1, batch.group_size) for column in (batch.state, batch.length))
        finished = (states >= SampleState.FINISHED) & (states != SampleState.DROPPED)
        seen = PromptsView(np.empty(0, np.uint64), lengths, finished)
        self._hints.observe(self._hints_of(batch), mean_lengths(seen))
        self._answers.pop(batch.step, None)


def _first_taken(worker: Worker) -> tuple[bool, bool, float, str]:
    return not worker.beside_trainer, worker.off_duty, worker.transfer_s, worker.name


def _plan_worker(worker: Worker, version: int) -> PlanWorker:
    return PlanWorker(
        worker.name,
        worker.runs,
        worker.latency.table,
        ready_in_s=worker.engine_rest.wakes_s if worker.off_duty else 0.0,
        transfer_s=worker.transfer_s if worker.policy_version < version else 0.0,
        beside_trainer=worker.beside_trainer,
    )


def _prompt_tokens(batch: StepBatch) -> np.ndarray:
    return np.array([len(ids) for ids in batch.prompt_ids], np.int32)
