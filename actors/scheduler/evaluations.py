"""Held-out evaluation: which version is due, its batch, and what that comes to.

    a due version can be had ─NeedEvaluation─▶ job ─IssueBatch─▶ issued ─▶ drawn and scored like any samples
         ▲                                                                    │ all settled
         └───────── the next one ◀── EvaluationDone ─▶ job ◀── durable ◀── Evaluated

    due    version 0, every ``eval.every`` steps, and the one that the last step makes

Invariants
- One evaluation at a time. A version that becomes due while another one is evaluated, and is past by then, is skipped,
  and events.jsonl says so; the last version never is.
- Its samples take slots that no sample of a step waits for (``actors/fleet/dispatch.py``), and count in no step.
- On-policy with ``eval.wait``: while a version is due or evaluated, workers are told of none beyond it, so all of its
  samples are its own. Else they are of it or newer, and the figures say of which.
- A job whose steps are done is over once its last version is evaluated, unless its operator has stopped it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import numpy as np

from actors.fleet.scope import JobScope
from actors.fleet.versions import Versions
from actors.host.best_link import mark_best
from actors.ledger import events as ev
from actors.ledger.batch import SampleState, StepBatch
from actors.ledger.whole_steps import whole
from actors.policies.pass_at_k import averages
from actors.protocol.evaluations import EvaluationDone, NeedEvaluation, evaluation_step, version_of
from actors.protocol.tokens import FinishReason
from configs.evaluation_schema import EvaluationConfig


class Evaluations:
    """It has versions evaluated, in a job that wants that; else it does nothing."""

    def __init__(self, scope: JobScope, versions: Versions, steps: Callable[[], int]) -> None:
        """``steps``: number of steps that the job has, by now."""
        self._scope = scope
        self._versions = versions
        self._steps = steps
        self._config = scope.job.eval
        self.ended: Callable[[], None] = lambda: None
        """Called when an evaluation is over."""
        self.of_episodes: Callable[[StepBatch], dict[str, float]] = lambda _: {}
        """Callback that says what an evaluation comes to besides, where its samples are episodes."""
        self._asked = (-1, 0.0)
        self._began_s: dict[int, float] = {}
        self._finishing: set[int] = set()
        if self._config is not None and self._config.wait and scope.job.staleness == 0 and not self._config.only:
            versions.held_back = self._held_back

    # ------------------------------------------------------------ which one

    def look(self) -> None:
        """Have the version evaluated that is due, if one is; finish what is settled."""
        config, ledger, now = self._config, self._scope.ledger, self._scope.ctx.now()
        if config is None:
            return
        for step in ledger.evaluations:
            self.settled(step)
        version, job = self._due_now(config), self._scope.services.get("job")
        if version is None or job is None or ledger.stopping:
            return
        asked, at_s = self._asked
        if version != asked or now - at_s > self._scope.limits.ask_timeout_s:
            self._asked = (version, now)
            self._scope.tell(job, NeedEvaluation(job=self._scope.name, version=version))

    def ask_again(self) -> None:
        """Ask for its prompts anew: the job, or their source, has begun to serve."""
        self._asked = (-1, 0.0)
        self.look()

    def _due_now(self, config: EvaluationConfig) -> int | None:
        """The newest version that is due and can be had; None while another one is evaluated, or if there is none."""
        if self._scope.ledger.evaluations:
            return None
        newest = 0 if config.only else self._versions.newest
        first, version = self._first(), newest if newest == self._steps() else newest - newest % config.every
        return version if first <= version <= newest else None

    def _first(self) -> int:
        """No version before this one can be evaluated any more."""
        return max(*self._scope.ledger.evaluated, -1, self._versions.oldest_held - 1) + 1

    def _held_back(self) -> int | None:
        """The version that is evaluated, or will be next: what is newer has to wait for it."""
        config, first, steps = self._config, self._first(), self._steps()
        if config is None or self._scope.ledger.stopping or first > steps:
            return None
        return min(-(-first // config.every) * config.every, steps)

    @property
    def end_is_open(self) -> bool:
        """Whether the job, whose steps are done, has its last version still to be evaluated."""
        ledger = self._scope.ledger
        if self._config is None or ledger.stopping:
            return False
        return bool(ledger.evaluations) or ledger.committed_steps not in ledger.evaluated

    # ------------------------------------------------------------ the best one

    @property
    def _keeps_best(self) -> bool:
        return self._config is not None and self._scope.job.checkpoint.keep_best

    def wants_checkpoint(self, version: int) -> bool:
        """Whether this version will be evaluated, and its checkpoint may be the best."""
        return self._keeps_best and self._config is not None and version % self._config.every == 0

    def spared(self) -> tuple[int, ...]:
        """Steps of checkpoints that must stay: the best one, those whose evaluation is not over, and those that the
        trainer may be storing still, of which it is not known yet whether they are better.
        """
        if not self._keeps_best:
            return ()
        ledger, first = self._scope.ledger, self._first()
        open_ = {version_of(step) for step in ledger.evaluations}
        waiting = [s for s, _ in ledger.checkpoints if s in open_ or (s >= first and self.wants_checkpoint(s))]
        stored = max((s for s, _ in ledger.checkpoints), default=0)
        storing = [s for s in range(stored + 1, ledger.trainer_step) if self.wants_checkpoint(s)]
        return (*waiting, *storing, *[step for step, _ in self._ranked()[:1]])

    async def mark_best(self) -> None:
        """Have ``checkpoints/best`` lead to the best checkpoint."""
        if self._keeps_best and (ranked := [Path(path) for _, path in self._ranked()]):
            await self._scope.ctx.run_blocking(mark_best, ranked)

    def _ranked(self) -> list[tuple[int, str]]:
        """Checkpoints whose version has been evaluated, the best first, and the older one of two that are equal."""
        known = self._scope.ledger.evaluated
        average = {
            step: known[step].get("avg_at_k", math.nan) for step, _ in self._scope.ledger.checkpoints if step in known
        }
        ranked = [c for c in self._scope.ledger.checkpoints if not math.isnan(average.get(c[0], math.nan))]
        return sorted(ranked, key=lambda checkpoint: (-average[checkpoint[0]], checkpoint[0]))

    # ------------------------------------------------------------ from begin to end

    def issue(self, event: ev.BatchIssued) -> bool:
        """Enter the batch of an evaluation; False if that was done before, or it is over."""
        ledger, version = self._scope.ledger, version_of(event.step)
        if event.step in ledger.batches or version in ledger.evaluated:
            return False
        if (former := max(ledger.evaluated, default=None)) is not None and self._config is not None:
            skipped = len(range(former + self._config.every - former % self._config.every, version, self._config.every))
            if skipped:
                self._scope.event("evaluations_skipped", version=version, skipped=skipped)
        self._scope.journaled.apply(event)
        self._began_s[event.step] = self._scope.ctx.now()
        samples = len(event.prompts) * event.group_size
        self._scope.event("evaluation_began", version=version, prompts=len(event.prompts), samples=samples)
        return True

    def settled(self, step: int) -> None:
        """Samples of that evaluation were scored or dropped."""
        batch = self._scope.ledger.batches.get(step)
        if batch is not None and step not in self._finishing and whole(batch):
            self._end(step, self._figures(batch))

    def give_up(self, version: int, why: str) -> None:
        """Its prompts cannot be read."""
        if version not in self._scope.ledger.evaluated:
            self._scope.trouble("evaluation_given_up", f"version {version} is not evaluated: {why}")
            self._end(evaluation_step(version), {})

    def _end(self, step: int, figures: dict[str, float]) -> None:
        self._finishing.add(step)
        self._scope.journaled.apply(ev.Evaluated(step, figures))
        self._scope.ctx.start_task(self._secure(version_of(step)), f"evaluation of version {version_of(step)}")

    async def _secure(self, version: int) -> None:
        """Tell of it once it is on disk."""
        await self._scope.journaled.journal.durable()
        self._finishing.discard(evaluation_step(version))
        figures = self._scope.ledger.evaluated[version]
        average = {"avg_at_k": round(figures["avg_at_k"], 6)} if figures else {}
        self._scope.event("evaluation_ended", version=version, **average)
        await self.mark_best()
        self._tell(version)
        self._versions.announce()
        self.ended()
        self.look()

    def job_registered(self) -> None:
        """Tell it of all that is over; it knows which of them are news. A former life may not have moved the link."""
        if self._keeps_best:
            self._scope.ctx.start_task(self.mark_best(), "mark the best checkpoint")
        for version in sorted(self._scope.ledger.evaluated):
            if evaluation_step(version) not in self._finishing:
                self._tell(version)

    def _tell(self, version: int) -> None:
        if (job := self._scope.services.get("job")) is not None:
            figures = self._scope.ledger.evaluated[version]
            self._scope.tell(job, EvaluationDone(job=self._scope.name, version=version, figures=figures))

    def _figures(self, batch: StepBatch) -> dict[str, float]:
        """What the samples come to. The journal keeps it, since the batch is let go."""
        assert self._config is not None, "only a job with an evaluation has such a batch"
        rows = np.flatnonzero(batch.state == SampleState.SCORED).astype(np.int32)
        marks = batch.ragged(rows).versions
        versions = said if len(said := marks[marks >= 0]) else np.array([version_of(batch.step)])
        now = self._scope.ctx.now()
        return averages(batch.reward.reshape(-1, batch.group_size), self._config.pass_reward) | {
            "k": batch.group_size,
            "prompts": len(batch.prompts),
            "samples": len(rows),
            "samples_dropped": len(batch) - len(rows),
            "response_tokens_mean": len(said) / len(rows) if len(rows) else np.nan,
            "truncated_fraction": float((batch.finish[rows] == FinishReason.LENGTH).mean()) if len(rows) else np.nan,
            "version_min": int(versions.min()),
            "version_max": int(versions.max()),
            "seconds": now - self._began_s.pop(batch.step, now),
            **self.of_episodes(batch),
        }
