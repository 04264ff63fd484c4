"""Makes the metrics of StepCommitted from the trainer's and the ledger's figures."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

import numpy as np

from actors.fleet.workers import WorkerTable
from actors.ledger.batch import SampleState, StepBatch
from actors.ledger.ledger import Ledger
from actors.policies.sharing.job_profile import slowdown, step_alone_s
from actors.protocol.endings import CUT
from actors.scheduler.filtering import FILTERED, filtered_columns
from configs.data_mix import Mix
from configs.schema import JobConfig

FROM_TRAINER = ("clip_fraction", "kl", "entropy", "grad_norm")
"""Keys of metrics.jsonl that only the trainer knows; NaN where it does not report them."""


class StepMeter:
    """Measures each step by the differences from the one before.

    Generation is cut where the step's last sample has been granted, since workers begin the next step before this
    one is committed; ``seconds`` runs from commit to commit.
    """

    def __init__(self, ledger: Ledger, workers: WorkerTable, now: float, job: JobConfig | None = None) -> None:
        self._ledger = ledger
        self._workers = workers
        self._since_s = now
        self._tokens = ledger.counters.tokens
        self._cut: tuple[int, float, dict[str, float]] | None = None
        self._measuring = False
        self._rewards = job.reward.names if job is not None else []
        self._sources = [source.name for source in job.data.mix] if job is not None else []
        self._filtered = job is not None and job.algorithm.filter == "spread"
        self._mix = Mix.of(job.data, job.seed) if job is not None and job.data.mix else None

    def begin(self, now: float) -> None:
        """Start the clock: the trainer has opened its first step, or the first prompts are there.

        The later of the two counts, since start-up is not part of a step. Once steps are measured from commit to
        commit, this does nothing.
        """
        if not self._measuring:
            self._since_s = now

    def cut(self) -> None:
        """Count tokens generated from now on for the next step. Only the first call of a step counts."""
        if self._cut is None:
            tokens = self._ledger.counters.tokens
            idle_fraction, prefills = self._workers.take_idle_fraction(), self._workers.take_prefills()
            self._cut = (tokens - self._tokens, idle_fraction, prefills)
            self._tokens = tokens

    def take(
        self, batch: StepBatch, policy_version: int, from_trainer: dict[str, float], now: float
    ) -> dict[str, float]:
        """The row of a step that has just been committed; the trainer's idle share is 0 if it gave none."""
        counters = self._ledger.counters
        rows = np.nonzero(batch.state == SampleState.COMMITTED)[0].astype(np.int32)
        ragged = batch.ragged(rows)
        said, versions = ragged.said, ragged.versions[ragged.versions >= 0]
        self.cut()
        assert self._cut is not None
        (generated, idle_fraction, prefills), self._cut = self._cut, None
        row: dict[str, float] = {
            "step": batch.step,
            "policy_version": policy_version,
            "seconds": now - self._since_s,
            "reward_mean": float(batch.reward[rows].mean()) if len(rows) else math.nan,
            "samples": len(rows),
            "samples_dropped": len(batch) - len(rows),
            "tokens_generated": generated,
            "tokens_trained": int(said.sum()),
            "response_tokens_mean": float(said.mean()) if len(rows) else math.nan,
            "response_tokens_max": int(said.max()) if len(rows) else math.nan,
            "truncated_fraction": float(np.isin(batch.finish[rows], CUT).mean()) if len(rows) else math.nan,
            "staleness_max": batch.step - int(versions.min()) if len(versions) else math.nan,
            "rollout_idle_fraction": idle_fraction,
            "rows_ignored": counters.unknown_rows + counters.duplicate_rows + counters.gap_rows,
            "samples_migrated": counters.samples_migrated,
            "prompts_lost": counters.prompts_lost,
            "samples_trained_twice": counters.samples_trained_twice,
        }
        if self._filtered:
            row |= filtered_columns(batch)
            row["samples_dropped"] -= sum(reason in FILTERED for reason in batch.drop_reasons.values())
        row |= prefills | {"distinct_prefix_tokens": distinct_tokens(batch.prompt_ids)}
        row |= self._workers.loads.take() | self._parts(batch, rows) | self._of_sources(batch, rows)
        self._since_s, self._measuring = now, True
        extra = {
            f"trainer_{k}" if k in row else k: v for k, v in from_trainer.items() if k not in ("step", "policy_version")
        }
        if "service_wait_s" in from_trainer:
            row["slowdown"] = _slowdown(row["seconds"], from_trainer)
        return dict.fromkeys(FROM_TRAINER, math.nan) | {"trainer_idle_fraction": 0.0} | extra | row

    def _parts(self, batch: StepBatch, rows: np.ndarray) -> dict[str, float]:
        """The mean of each of several rewards; NaN where the journal has none, or no sample was trained."""
        found = batch.reward_parts[rows]
        means = found.mean(axis=0).tolist() if found.size else [math.nan] * len(self._rewards)
        return {f"reward_{name}_mean": mean for name, mean in zip(self._rewards, means, strict=True)}

    def _of_sources(self, batch: StepBatch, rows: np.ndarray) -> dict[str, float]:
        """The mean reward of each of several sources of prompts; NaN where none of its samples was trained."""
        if self._mix is None:
            return {}
        source_of = np.array([self._mix.source_of(prompt) for prompt in batch.prompts.tolist()])
        sources, rewards = source_of[rows // batch.group_size], batch.reward[rows]
        return {
            f"source_{name}_reward_mean": float(rewards[sources == i].mean()) if (sources == i).any() else math.nan
            for i, name in enumerate(self._sources)
        }


def _slowdown(seconds: float, from_trainer: dict[str, float]) -> float:
    """How many times longer the step took than it would have with the training service to itself."""
    alone_s = step_alone_s(
        seconds,
        waited_s=from_trainer["service_wait_s"],
        switch_s=from_trainer.get("switch_s", 0.0),
        busy_s=from_trainer.get("compute_s", 0.0),
    )
    return slowdown(seconds, alone_s)


def distinct_tokens(prompts: Sequence[np.ndarray]) -> int:
    """Number of tokens of these prompts (int32[any] each), if each shared prefix counts once.

    That is the number of nodes of their trie: 6 for "ssaa", "ssab", "ssc".

    In sorted order, a prompt adds the tokens that it does not share with the one before it.
    """
    ordered = sorted(
        (np.ascontiguousarray(prompt, np.int32) for prompt in prompts), key=lambda prompt: prompt.tobytes()
    )
    return sum(map(len, prompts)) - sum(_shared(one, other) for one, other in pairwise(ordered))


def _shared(one: np.ndarray, other: np.ndarray) -> int:
    most = min(len(one), len(other))
    differs = one[:most] != other[:most]
    return int(differs.argmax()) if differs.any() else most
