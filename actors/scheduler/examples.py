"""Shows users some samples of a committed step: the best, the worst, some at random, one that was dropped.

    committed batch ─▶ choose ─▶ ShowSamples ─▶ rewards (decodes) ─▶ Samples ─▶ metrics ─▶ samples.jsonl, W&B

Invariants
- Nobody waits for it: samples are sent once, and are not shown if there is no reward worker.
- At most one step in ``limits.samples_interval_s`` is shown, so fast loops pay nothing.
"""

from __future__ import annotations

import math

import numpy as np

from actors.fleet.scope import JobScope
from actors.ledger.batch import SampleState, StepBatch
from actors.protocol.rewards import SampleToShow, ShowSamples


class Examples:
    """Chooses samples and has them shown."""

    def __init__(self, scope: JobScope) -> None:
        self._scope = scope
        self._rng = scope.ctx.rng("examples")
        self._next_s = -math.inf

    def show(self, batch: StepBatch) -> None:
        """Show some samples of a step that has just been committed, unless the last ones are too recent."""
        scope, now = self._scope, self._scope.ctx.now()
        rewards = scope.services.get("rewards")
        if not scope.job.metrics.samples or rewards is None or now < self._next_s:
            return
        self._next_s = now + scope.limits.samples_interval_s
        chosen = [_sample(batch, row, why) for row, why in self._choose(batch).items()]
        scope.tell(rewards, ShowSamples(job=scope.name, step=batch.step, samples=chosen))

    def _choose(self, batch: StepBatch) -> dict[int, str]:
        """The chosen rows, each with the reason."""
        trained = np.nonzero(batch.state == SampleState.COMMITTED)[0]
        chosen: dict[int, str] = {}
        if len(trained):
            rewards = batch.reward[trained]
            chosen[int(trained[rewards.argmax()])] = "best"
            chosen.setdefault(int(trained[rewards.argmin()]), "worst")
            others = [row for row in trained.tolist() if row not in chosen]
            count = min(self._scope.limits.samples_random, len(others))
            chosen |= dict.fromkeys(self._rng.sample(others, count), "random")
        if batch.drop_reasons:
            chosen[next(iter(batch.drop_reasons))] = "dropped"
        return chosen


def _sample(batch: StepBatch, row: int, chosen: str) -> SampleToShow:
    index, sibling = divmod(row, batch.group_size)
    reward = float(batch.reward[row])
    response = batch.ragged(np.array([row], np.int32))
    return SampleToShow(
        chosen=chosen,
        prompt=int(batch.prompts[index]),
        sibling=sibling,
        prompt_ids=batch.prompt_ids[index],
        token_ids=response.tokens,
        versions=response.versions,
        finish=int(batch.finish[row]),
        reward=None if math.isnan(reward) else reward,
        parts=[] if math.isnan(reward) else batch.reward_parts[row].tolist(),
        reason=batch.drop_reasons.get(row, ""),
        context=batch.contexts[index],
    )
