"""The combined policy on the scenarios of the two papers, typed: on which set-ups, and with which staleness."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from benchmarks.papers.setups.rlboost import HYBRID, HybridName, HybridSetup
from benchmarks.papers.setups.streamrl import MODELS, SCALES, ModelName, Ranker, SteadyWorkload, Variant, Workload
from configs.schema import NonNegativeInt, PositiveFloat, PositiveInt, Section

Staleness = Annotated[int, Field(ge=0, le=8)]


class CombinedStreamStudy(Section):
    """Runs StreamRL's Fig. 8 against its asynchronous mode, on the same devices, with one step of staleness."""

    kind: Literal["combined_streamrl"]
    models: list[ModelName] = Field(default_factory=lambda: list(MODELS))
    """Models of the paper that are run."""
    variants: list[Variant] = Field(default_factory=lambda: list(SCALES))
    """Variants of lengths that are run."""
    staleness: Staleness = 1
    """Number of versions by which a sample may begin with an older one than its step's."""
    long_steps: PositiveInt = 40
    """Steps of the longer job whose share of the bound is told too: in ten steps a cold start and the end weigh
    much."""
    workload: SteadyWorkload = Workload()


class CombinedStaticStudy(Section):
    """Runs RLBoost's Fig. 11, fixed numbers of workers that come and go, against its own policy."""

    kind: Literal["combined_static"]
    model: HybridName = "14B"
    workers: list[NonNegativeInt] = Field(default_factory=lambda: [1, 3, 6])
    """Workers, one run for each number."""
    staleness: Staleness = 0
    """Number of such versions; 0: strictly on-policy, as RLBoost is."""
    draws: PositiveInt = 4
    """Draws of the samples, with seeds that count on. Each number is the mean over them: one draw's lie up to 8 %
    apart."""
    ranker: Ranker = Ranker()
    setup: HybridSetup = HybridSetup()


class CombinedSpotStudy(Section):
    """Runs RLBoost's real traces, over the same three parts, against its own policy."""

    kind: Literal["combined_spot"]
    trace: str = "configs/traces/bamboo_g4dn.csv"
    """Path from the repository's root."""
    part: Annotated[float, Field(gt=0, le=1)] = 0.5
    """Part of the trace's machines, drawn."""
    segment_s: PositiveFloat = 7200.0
    models: list[HybridName] = Field(default_factory=lambda: list(HYBRID))
    staleness: Staleness = 1
    """Number of such versions. RLBoost itself is strictly on-policy: 1 is what StreamRL adds."""
    ranker: Ranker = Ranker()
    setup: HybridSetup = HybridSetup()
