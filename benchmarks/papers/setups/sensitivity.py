"""How far the policies bear what is worse than in the papers: one parameter a study, several values of it.

Each study runs policies and their plain baseline on the same samples and machines; what comes out are ratios.
``docs/papers/sensitivity.md`` shows them.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from benchmarks.papers.setups.combined import Staleness
from benchmarks.papers.setups.hardware import Fraction
from benchmarks.papers.setups.rlboost import HYBRID, HybridName, HybridSetup
from benchmarks.papers.setups.streamrl import MODELS, ModelName, Ranker, SteadyWorkload, Variant, Workload
from configs.schema import PositiveFloat, PositiveInt, Section

Recall = Annotated[float, Field(gt=0.2, le=1)]


class RankerSweep(Section):
    """Runs StreamRL's dispatch with rankers that find less and less of the longest fifth, against equal shares."""

    kind: Literal["sensitivity_ranker"]
    models: list[ModelName] = Field(default_factory=lambda: list(MODELS))
    variant: Variant = "20K"
    recalls: list[Recall] = Field(default_factory=lambda: [1.0, 0.9, 0.8, 0.7, 0.6, 0.5])
    """Recalls of the longest 20 %, above 0.2; after them comes a ranking by chance."""
    draws: PositiveInt = 3
    """Seeds, counted from the scenario's."""
    workload: Workload = Workload()


class CombinedRankerSweep(Section):
    """Runs the combined policy with such rankers, against itself without ranking."""

    kind: Literal["sensitivity_ranker_combined"]
    models: list[ModelName] = Field(default_factory=lambda: list[ModelName](("32B", "72B")))
    variant: Variant = "20K"
    hybrid: list[HybridName] = Field(default_factory=lambda: list(HYBRID))
    """Models of RLBoost's set-up."""
    workers: PositiveInt = 3
    """Workers on machines that do not train, there; they stay."""
    recalls: list[Recall] = Field(default_factory=lambda: [1.0, 0.9, 0.8, 0.7, 0.6, 0.5])
    """Recalls of the longest 20 %, above 0.2; after them comes a ranking by chance."""
    staleness: Staleness = 1
    draws: PositiveInt = 2
    """Seeds, counted from the scenario's, on StreamRL's set-up."""
    hybrid_draws: PositiveInt = 6
    """Seeds on RLBoost's, where a step has an eighth of the groups, and one draw is several percent off."""
    workload: SteadyWorkload = Workload()
    setup: HybridSetup = HybridSetup(boot_s=1e-3, steps=8)
    """Machines that are there from the beginning."""


class BandwidthSweep(Section):
    """Makes the links for the weights slower and slower, for StreamRL's modes, RLBoost and the combined policy."""

    kind: Literal["sensitivity_bandwidth"]
    slower: list[PositiveFloat] = Field(default_factory=lambda: [1.0, 3.0, 10.0])
    """Divisors of the published bandwidths."""
    models: list[ModelName] = Field(default_factory=lambda: list(MODELS))
    variant: Variant = "5K"
    """Variant with the shortest iterations, in which a transfer counts most."""
    hybrid: list[HybridName] = Field(default_factory=lambda: list(HYBRID))
    """Models of RLBoost's set-up."""
    workers: PositiveInt = 6
    """Workers on machines that do not train, there; they stay."""
    staleness: Staleness = 1
    """Staleness of the combined policy."""
    draws: PositiveInt = 2
    """Seeds, counted from the scenario's."""
    ranker: Ranker = Ranker()
    workload: SteadyWorkload = Workload()
    setup: HybridSetup = HybridSetup(steps=12)


class PreemptionSweep(Section):
    """Follows a real trace of spot machines, of which as many are there, and live shorter and shorter."""

    kind: Literal["sensitivity_preemptions"]
    times: list[PositiveInt] = Field(default_factory=lambda: [1, 2, 5])
    """Multiples of the preemptions in the trace."""
    trace: str = "configs/traces/bamboo_g4dn.csv"
    """Path from the repository's root."""
    part: Fraction = 0.5
    """Part of the trace's machines, drawn."""
    segment_s: PositiveFloat = 7200.0
    models: list[HybridName] = Field(default_factory=lambda: list(HYBRID))
    staleness: Staleness = 1
    """Staleness of the combined policy."""
    ranker: Ranker = Ranker()
    setup: HybridSetup = HybridSetup()


class PoolSweep(Section):
    """Mixes rollout instances on two kinds of devices, of one price together, dispatched by their own latencies."""

    kind: Literal["sensitivity_pools"]
    models: list[ModelName] = Field(default_factory=lambda: list(MODELS))
    variant: Variant = "20K"
    shares: Annotated[list[Annotated[float, Field(ge=0, le=1)]], Field(min_length=3)] = Field(
        default_factory=lambda: [0.0, 0.25, 0.5, 0.75, 1.0]
    )
    """Parts of the money that are spent on H20; the rest on H800. The first and the last are pools of one kind."""
    draws: PositiveInt = 3
    """Seeds, counted from the scenario's."""
    workload: Workload = Workload(iterations=8)
