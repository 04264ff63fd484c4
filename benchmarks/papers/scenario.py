"""The scenario file of a published result: what to simulate, and which numbers the paper prints for it.

    configs/papers/X.yaml ─▶ PaperScenario ── study ──▶ benchmarks/papers/studies ─▶ measures, by name
                                 └─────────── claims ─────────────────┴──▶ rows: published beside ours

Published numbers and their source stand in the file, ours come out of the run; no measure is ever read from a file.
A kind of study is a section in ``benchmarks/papers/setups`` and a function in ``benchmarks/papers/studies``.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, model_validator

from benchmarks.papers.setups.combined import CombinedSpotStudy, CombinedStaticStudy, CombinedStreamStudy
from benchmarks.papers.setups.plexrl import DecodeEfficiencyStudy, FleetStudy, SharingStudy, SlicesStudy
from benchmarks.papers.setups.rlboost import MigrationStudy, SeedingStudy, SpotStudy, StaticStudy
from benchmarks.papers.setups.rlhfless import AssignStudy, BillStudy, ClusterStudy, ScalingStudy, SweepStudy
from benchmarks.papers.setups.sensitivity import (
    BandwidthSweep,
    CombinedRankerSweep,
    PoolSweep,
    PreemptionSweep,
    RankerSweep,
)
from benchmarks.papers.setups.streamrl import (
    CostStudy,
    DecodeStudy,
    GrowthStudy,
    LadderStudy,
    LengthsStudy,
    RankerStudy,
    RankingStudy,
    SplitStudy,
    ThroughputStudy,
)
from configs.schema import NonNegativeInt, Section
from configs.validation import load_file
from configs.yaml_source import read_yaml

Study = Annotated[
    LengthsStudy
    | RankerStudy
    | DecodeStudy
    | ThroughputStudy
    | LadderStudy
    | RankingStudy
    | SplitStudy
    | GrowthStudy
    | CostStudy
    | StaticStudy
    | SeedingStudy
    | MigrationStudy
    | SpotStudy
    | CombinedStreamStudy
    | CombinedStaticStudy
    | CombinedSpotStudy
    | RankerSweep
    | CombinedRankerSweep
    | BandwidthSweep
    | PreemptionSweep
    | PoolSweep
    | SharingStudy
    | SlicesStudy
    | FleetStudy
    | DecodeEfficiencyStudy
    | ScalingStudy
    | AssignStudy
    | SweepStudy
    | ClusterStudy
    | BillStudy,
    Field(discriminator="kind"),
]
"""Kinds of study that there are; a new one is added here and to ``benchmarks/papers/studies/registry.py``."""


class Claim(Section):
    """A claim is one published number, and says how near ours has to be."""

    claim: Annotated[str, Field(min_length=1)]
    """Claim in words, for people."""
    source: Annotated[str, Field(min_length=1)]
    """Figure, table or section that it is taken from."""
    measure: Annotated[str, Field(min_length=1)]
    """Name of the measure of this study that stands against it."""
    published: float | tuple[float, float]
    """Number that was published, or [least, most] of a band."""
    tolerance: Annotated[float, Field(ge=0)]
    """Distance that ours may have from it."""
    tolerance_is: Literal["relative", "absolute"] = "relative"
    """Unit of the tolerance: ``relative``: a fraction of ``published``; ``absolute``: its own unit."""
    holds: Literal["near", "at_least", "at_most"] = "near"
    """Side on which ours has to lie: ``near``: both, within the tolerance; the others: one."""

    @model_validator(mode="after")
    def _ordered(self) -> Claim:
        low, high = self.band
        if low > high:
            raise ValueError(f"published as [least, most]; found [{low}, {high}]")
        return self

    @property
    def band(self) -> tuple[float, float]:
        """Least and most that was published."""
        return self.published if isinstance(self.published, tuple) else (self.published, self.published)

    def within(self, ours: float) -> bool:
        """Whether ``ours`` agrees."""
        low, high = (
            (edge, abs(edge) * self.tolerance if self.tolerance_is == "relative" else self.tolerance)
            for edge in self.band
        )
        enough, not_too_much = ours >= low[0] - low[1], ours <= high[0] + high[1]
        return (enough or self.holds == "at_most") and (not_too_much or self.holds == "at_least")


class PaperScenario(Section):
    """A scenario asks for one published result."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,63}$")]
    """Name of the scenario."""
    paper: Annotated[str, Field(min_length=1)]
    """Paper in which the result was published."""
    seed: NonNegativeInt = 0
    """Number that fixes every draw; ``--seed`` takes its place."""
    study: Study
    """Study that is simulated; ``kind`` says which keys it has."""
    claims: Annotated[list[Claim], Field(min_length=1)]
    """Claims of the paper."""


def is_paper_scenario(path: Path) -> bool:
    """Whether the file at ``path`` has claims to check, and no jobs to run.

    Raises:
        ConfigError: it cannot be read or is no YAML.
    """
    values, _ = read_yaml(path, holds="jobs and faults, or a study and claims", example="configs/chaos.yaml")
    return "study" in values or "claims" in values


def load_paper_scenario(path: str | Path) -> PaperScenario:
    """The scenario in the YAML file at ``path``.

    Raises:
        ConfigError: it cannot be read, is no YAML, or does not fit; the message names line and field.
    """
    return load_file(PaperScenario, path, holds="a study and claims", example="configs/papers/streamrl_lengths.yaml")
