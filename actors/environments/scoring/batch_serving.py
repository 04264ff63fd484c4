"""Serves one reward that scores many responses at once, in a scorer process that does nothing else.

    {"score": [[response, context], …]} ──▶ rows looked up ──▶ at most ``batch`` at once ──▶ BatchScorer ──▶ verdicts

Invariants
- Every response gets a finite number or a reason.
- When ``gather_s`` is 0, a batch is one response, so that the parent learns which response kills this process.
- An error that no repeat will mend (``RewardRefused``) is sent instead of verdicts, and ends the run.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from time import monotonic
from typing import Any

from actors.environments.errors import RewardError, RewardRefused
from actors.environments.prompts.rows import Source
from actors.environments.prompts.sources import open_all_sources
from actors.environments.scoring.batches import Asked, BatchScorer
from actors.environments.scoring.examples import Examples, source_of
from actors.environments.scoring.scorer_frames import Answer, ScorerVerdict, Send, as_text
from actors.environments.scoring.trial import CALLED, first_examples
from actors.host.user_code import described
from configs.schema import JobConfig


def batch_scorer(job: JobConfig, order: dict[str, Any], send: Send) -> Answer:
    """The function that answers requests of ``scorer_process.py`` for the one reward that ``order`` names."""
    where, reward = job.reward.each[order["parts"][0]]
    if reward.kind == "http":
        from actors.environments.scoring.http_scorer import HttpScorer

        scorer: BatchScorer = HttpScorer(job, where, reward, order["policy"])
    else:
        from actors.environments.scoring.model_scorer import ModelScorer

        scorer = ModelScorer(where, reward)
    sources = open_all_sources(job) if order["rows"] else {}
    serving = _Serving(job, f"{where}.kind {reward.kind}", scorer, sources, send)
    return serving.answer


class _Serving:
    """Answers requests with one scorer."""

    def __init__(
        self, job: JobConfig, called: str, scorer: BatchScorer, sources: Mapping[str, Source], send: Send
    ) -> None:
        self._job = job
        self._called = called
        self._several = bool(job.reward.parts)
        self._scorer = scorer
        self._sources = sources
        self._examples = Examples(sources)
        self._send = send

    def answer(self, request: dict[str, Any]) -> None:
        if "try" in request:
            self._send({"warnings": [as_text(warning) for warning in self._tried()]})
            return
        items: Sequence[tuple[str, bytes]] = request["score"]
        size = self._scorer.batch if request["gather_s"] else 1
        for first in range(0, len(items), size):
            self._send(self._scored(items[first : first + size]))

    def _tried(self) -> list[str]:
        """Score the first row of every source with its own answer; returns warnings for people."""
        warnings: list[str] = []
        for name, source in self._sources.items():
            data = self._job.all_sources[name]
            for example in first_examples(data, self._job.seed, source)[:1]:
                response = example.answer if isinstance(example.answer, str) else ""
                began_s = monotonic()
                found = self._scorer.try_once(Asked(response, example, data))
                took_s = monotonic() - began_s
                if found.reward is None:
                    warnings.append(f"{self._called} gave no verdict: {found.reason}, {CALLED}")
                elif took_s > self._job.reward.timeout_s:
                    warnings.append(f"{self._called} took {took_s:.1f} s, longer than reward.timeout_s: raise it")
        return warnings

    def _scored(self, items: Sequence[tuple[str, bytes]]) -> list[ScorerVerdict]:
        verdicts = [ScorerVerdict(None)] * len(items)
        asked: dict[int, Asked] = {}
        for i, (response, context) in enumerate(items):
            try:
                data = self._job.all_sources.get(source_of(context), self._job.data)
                asked[i] = Asked(response, self._examples.of(context), data)
            except RewardError as error:
                verdicts[i] = self._verdict(ScorerVerdict(None, str(error)))
        for i, found in zip(asked, self._asked(list(asked.values())), strict=True):
            verdicts[i] = self._verdict(found)
        return verdicts

    def _asked(self, asked: Sequence[Asked]) -> list[ScorerVerdict]:
        if not asked:
            return []
        try:
            return self._scorer.score(asked, lambda: self._send([]))
        except RewardRefused:
            raise
        except Exception as error:  # noqa: BLE001 (a model's code, or a library's: its verdict is that there is none)
            return [ScorerVerdict(None, described(error))] * len(asked)

    def _verdict(self, found: ScorerVerdict) -> ScorerVerdict:
        reward, reason = found.reward, found.reason
        if reward is not None and not math.isfinite(reward):
            reward, reason = None, f"the scorer returned {reward}; expected a finite number"
        if reward is not None:
            return ScorerVerdict(reward, "", (reward,) if self._several else (), found.cut)
        return ScorerVerdict(None, as_text(f"{self._called}: {reason}"))
