"""How many workers generate a step, and which prompts each of them gets (RLHFless, arXiv 2602.22718).

    PlanView ─▶ for N in workers_min .. workers_max: parts of the sorted prompts ─▶ predicted end and cost ─▶ StepPlan

Pure: the workers, expected lengths and the rule in, a plan out; the same live and in the studies of the paper.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np

from actors.policies.bill import Rule
from actors.policies.latency_table import LatencyTable


class PlanWorker(NamedTuple):
    """It is a worker that could generate the step, or one that could be started for it."""

    name: str
    slots: int
    """Samples that it decodes at once."""
    latency: LatencyTable
    """Its decode steps as measured; empty: nobody has yet, so that of the others counts."""
    prefill_token_s: float = 0.0
    ready_in_s: float = 0.0
    """Seconds until it is awake: 0 if it is, else what waking it or starting it takes."""
    transfer_s: float = 0.0
    """Seconds until weights and prompts are there; the nearer the worker, the fewer."""
    beside_trainer: bool = False
    price: float = 1.0
    """Price of an awake second, in any unit that is the same for all."""
    exists: bool = True
    """Whether it is there, be it asleep; one that is not begins a life, which is billed by itself."""


@dataclass(frozen=True, slots=True)
class PlanRule:
    """It is what the job file says under ``scheduling.plan``."""

    choose: Literal["lambda", "pareto", "fixed"] = "lambda"
    time_weight: float = 0.7
    within: float = 0.05
    parts: Literal["even", "balanced"] = "balanced"


@dataclass(frozen=True, slots=True)
class PlanView:
    """It is what is known when a step is planned. Arrays have one entry for each prompt that waits, in its order."""

    workers: Sequence[PlanWorker]
    """Workers in the order in which they would be taken."""
    expected_tokens: np.ndarray
    """Expected tokens of one response, float64[p]; NaN: unknown, which counts as the median of the known."""
    siblings: np.ndarray
    """Queued samples of each prompt, int32[p]."""
    prompt_tokens: np.ndarray
    """Tokens of each prompt, int32[p]."""
    workers_min: int
    workers_max: int
    max_tokens: int
    """Response length limit."""
    rule: PlanRule
    bill: Rule


class Forecast(NamedTuple):
    """It is what would become of the step with so many workers."""

    workers: int
    seconds: float
    """Seconds from the plan to the last token."""
    cost: float
    """Worker-seconds, each weighted with its worker's price."""
    violation_s: float
    """Seconds by which the worst worker ends after the one with the longest part, so that getting its weights and
    prompts there is not hidden (B.7 of the reference: ``L_model + L_kv + L_decode_i <= L_prefill + L_decode_1``)."""


@dataclass(frozen=True, slots=True)
class StepPlan:
    """It says who generates what."""

    parts: dict[str, np.ndarray]
    """Worker → positions of its prompts, int32[n], those expected to be longest first. Workers that are not named get
    nothing. The first worker has the longest part."""
    ends_s: dict[str, float]
    """Worker → seconds from the plan until it is expected to end; NaN where nothing has been measured."""
    chosen: Forecast
    forecasts: Sequence[Forecast]
    """What was compared, by number of workers, ascending; empty where nothing has been measured yet."""
    why: str
    """The reason in words, for whoever reads the run."""

    @property
    def longest(self) -> str | None:
        """Worker that has the longest part, which is never cut; None: there was nothing to plan."""
        return next(iter(self.parts), None)


def decide(view: PlanView, now: float) -> StepPlan:
    """The plan of one step. ``now`` is not used: all times of the view count from this moment."""
    raise NotImplementedError("planning a step is not built yet")
