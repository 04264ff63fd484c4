"""PlexRL's studies, typed: jobs that share training services, and what is varied.

The paper (arXiv 2605.20863) is public in its abstract and in digests only. What was published: bubble ratios, layouts,
savings, two decode efficiencies, the fleet's completion times. What is not is inferred or fitted, and says so;
``docs/papers/plexrl.md`` tells the whole of it.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from benchmarks.papers.setups.hardware import Fraction
from benchmarks.papers.setups.streamrl import LengthHistogram
from configs.schema import NonNegativeInt, PositiveFloat, PositiveInt, Section


class PlexModel(Section):
    """Holds a model of the evaluation with the devices that a job of it has."""

    name: str
    """Name in the paper."""
    train_devices: PositiveInt
    """Devices of the shared pool, from the published layout."""
    rollout_devices: PositiveInt
    """Devices that a job has for itself; inferred from the savings, which they bound by a third, and by 3/8."""
    bubble: Fraction
    """Part of the time in which the training pool does not compute, as published."""
    lag: Annotated[int, Field(ge=0, le=1)] = 0
    """Steps for which a job generates ahead of training; inferred: with 0, waiting alone explains the two savings that
    are below their bound, with 1 the one that is at it."""


PlexName = Literal["7B", "30B", "235B"]
MODELS: dict[PlexName, PlexModel] = {
    "7B": PlexModel(name="7B", train_devices=16, rollout_devices=8, bubble=0.801),
    "30B": PlexModel(name="30B", train_devices=128, rollout_devices=64, bubble=0.7067),
    "235B": PlexModel(name="235B", train_devices=96, rollout_devices=32, bubble=0.8111, lag=1),
}


class SliceSetup(Section):
    """Says how jobs' steps look on one service; a step alone takes the time 1."""

    variation: PositiveFloat = 0.3
    """Coefficient of variation of a step's rollouts; inferred."""
    switch: Annotated[float, Field(ge=0)] = 0.01
    """Time to load a job's state, as part of a step; inferred from bytes and links."""
    steps: PositiveInt = 2000
    policy: Literal["hrrs", "fifo", "round_robin"] = "hrrs"
    hysteresis: Annotated[float, Field(ge=0)] = 0.2
    starvation: PositiveFloat = 10.0
    """Guard, in steps."""


class SharingStudy(Section):
    """Lets jobs of one model share a training pool, and counts devices."""

    kind: Literal["plexrl_share"]
    models: list[PlexName] = Field(default_factory=lambda: list(MODELS))
    jobs: PositiveInt = 2
    """Jobs of a pool, as published."""
    setup: SliceSetup = SliceSetup()


class SlicesStudy(Section):
    """Compares whole bursts with micro-batches, and queues with each other."""

    kind: Literal["plexrl_slices"]
    mixes: list[tuple[PositiveInt, Fraction]] = Field(
        default_factory=lambda: [(2, 0.2), (2, 0.3), (3, 0.2), (3, 0.3), (4, 0.2)]
    )
    """Equal jobs and their duty."""
    micro_batches: PositiveInt = 8
    """Micro-batches of a step."""
    unequal: list[tuple[PositiveFloat, Fraction]] = Field(default_factory=lambda: [(1.0, 0.2), (4.0, 0.2), (16.0, 0.2)])
    """Jobs that differ: time of a step alone, and duty."""
    setup: SliceSetup = SliceSetup()


class FleetClass(Section):
    """Holds the part of the cluster that jobs of one model have."""

    name: str
    """Name of the model."""
    isolated: PositiveInt
    """Services where each serves one job."""
    shared: PositiveInt
    """Services on as many devices where each serves up to ``jobs_max``, with rollout devices for as many jobs."""
    bubble: Fraction


CLASSES: dict[PlexName, FleetClass] = {
    "7B": FleetClass(name="7B", isolated=29, shared=17, bubble=0.801),  # 696 and 680 devices
    "30B": FleetClass(name="30B", isolated=5, shared=3, bubble=0.7067),  # 960 and 960
    "235B": FleetClass(name="235B", isolated=3, shared=2, bubble=0.8111),  # 384 and 384
}
"""2,048 devices, divided so that both columns come out in whole services; the division is ours."""


class FleetStudy(Section):
    """Runs the jobs of months through a cluster under each placement policy."""

    kind: Literal["plexrl_fleet"]
    models: list[PlexName] = Field(default_factory=lambda: list(CLASSES))
    jobs_max: PositiveInt = 3
    """Jobs of a service; inferred from the published completion time."""
    load: PositiveFloat = 1.09
    """Work that arrives over what isolated services can do meanwhile. Fitted to the published completion times."""
    days: PositiveFloat = 45.0
    """Time over which jobs arrive; the paper's trace has three months."""
    job_hours: PositiveFloat = 48.0
    """Mean time of a job alone, log-normal; not published."""
    job_spread: PositiveFloat = 0.9
    """Standard deviation of its logarithm."""
    step_s: PositiveFloat = 300.0
    """Median time of a step, log-normal with 0.4; not published."""
    duty_spread: Annotated[float, Field(ge=0)] = 0.25
    """Standard deviation of the logarithm of a job's duty, whose mean is that of its model."""
    state_gb: tuple[PositiveFloat, PositiveFloat] = (10.0, 60.0)
    """Least and most bytes of a job's state; not published."""
    parked_gb: PositiveFloat = 150.0
    """Room of a service for the states of its jobs."""
    duty_max: Fraction = 0.8
    slowdown_max: Annotated[float, Field(ge=1)] = 1.10
    draws: PositiveInt = 12
    """Seeds, counted from the scenario's."""


class DecodeEfficiencyStudy(Section):
    """Generates one batch on few replicas, and on the many that training's devices make."""

    kind: Literal["plexrl_decode"]
    replica_samples: PositiveInt = 256
    """Samples of a replica where rollouts have devices of their own. Fitted, with the next one, to their efficiency."""
    half_batch: PositiveFloat = 32.5
    """Batch at which a decode step takes twice as long as with one sample. Only its ratio to the other counts."""
    more_replicas: PositiveInt = 4
    """Factor of replicas in the colocated deployment: all devices of a 235B job over its rollout devices."""
    lengths: LengthHistogram = LengthHistogram()
    """Lengths of responses; the paper's are not public, these are StreamRL's."""
    draws: NonNegativeInt = 100
