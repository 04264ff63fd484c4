"""The scenario file of ``headrace simulate``, typed: jobs, machines, network and faults of a simulated run.

    SCENARIO.yaml ─▶ load_scenario ─▶ Scenario ── with a seed ──▶ supervisors/simulation

A seed fixes every event. Whatever a scenario leaves open (which of its jobs run, which faults strike when) is drawn
from the seed.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Final, Literal

from pydantic import Field, model_validator

from configs.fault_plan import Fault, Kind
from configs.limits import Limits
from configs.local_paths import found
from configs.presets import scenario_names
from configs.provider_schema import SpotConfig
from configs.schema import (
    JobConfig,
    NonNegativeInt,
    PlanConfig,
    PositiveFloat,
    PositiveInt,
    Section,
    SyncMode,
)
from configs.services import AUTO, ServicesConfig
from configs.validation import load_file

Seconds = Annotated[float, Field(ge=0)]
Probability = Annotated[float, Field(ge=0, le=1)]
_HEALABLE: Final[tuple[Kind, ...]] = (
    "kill", "hang", "slow", "partition", "drop", "delay", "duplicate", "corrupt", "preempt",
)  # fmt: skip
TargetRole = Literal[
    "rollout", "trainer", "rank", "weights", "rewards", "gateway", "environments", "train_service", "node", "head"
]


class SimulatedJob(Section):
    """A job of simulated engines and a simulated trainer. Keys mean what they mean in a job file."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,31}$")]
    """What the job is called."""
    mode: SyncMode = "sync"
    """As ``sync.mode``."""
    length_ranking: Literal["none", "history", "siblings", "learned"] = "none"
    """As ``rollout.length_ranking``."""
    max_staleness: NonNegativeInt = 1
    """``async`` only."""
    steps: PositiveInt = 4
    """Optimizer steps."""
    prompts_per_step: PositiveInt = 2
    """As ``algorithm.prompts_per_step``."""
    prompts: NonNegativeInt = 0
    """Different ones, after which the next epoch begins; 0: each is new."""
    group_size: PositiveInt = 2
    """As ``algorithm.group_size``; 1 is for a job with a critic."""
    critic: bool = False
    """It learns as with ``algorithm.name: ppo``, with a reference; the critic learns alone in the first step."""
    workers: NonNegativeInt = 2
    """Rollout workers."""
    tensor_parallel: PositiveInt = 1
    """As ``rollout.tensor_parallel``."""
    max_running: PositiveInt | Literal["auto"] = 8
    """Samples decoded together by one worker; as ``rollout.max_running``."""
    prompt_tokens: PositiveInt = 8
    """Longest prompt; lengths are drawn."""
    max_tokens: PositiveInt = 24
    """Longest response."""
    mean_tokens: PositiveFloat = 12.0
    """Mean length of responses that nothing cuts short."""
    by_prompt: Probability = 0.0
    """How much of a response's length its prompt decides."""
    place_rollout: Literal["local", "remote", "spread", "elastic"] = "spread"
    """As ``cluster.place_rollout``."""
    policy: Literal["assign", "rlboost", "planned"] = "assign"
    """As ``scheduling.policy``."""
    plan: PlanConfig = PlanConfig()
    """As ``scheduling.plan``."""
    functions: bool = False
    """All workers but ``workers`` are functions, as with ``provider.kind: functions``; for a job that runs alone."""
    idle_s: Seconds | None = None
    """As ``provider.idle_s``."""
    relief: bool = False
    """As ``scheduling.relief``."""
    workers_min: PositiveInt = 1
    """As ``scheduling.workers_min``."""
    workers_max: PositiveInt | None = None
    """As ``scheduling.workers_max``."""
    seeding: bool = False
    """As ``scheduling.seeding``."""
    seeding_first_s: PositiveFloat = 4.0
    """As ``scheduling.seeding_first_s``."""
    seeding_floor_s: Seconds = 0.5
    """As ``scheduling.seeding_floor_s``."""
    seeding_end: Literal["learned", "estimated"] = "learned"
    """As ``scheduling.seeding_end``."""
    decode_s: Seconds = 0.0
    """Time of an engine's step for each sequence that it decodes, on top of ``costs.engine_step_s``."""
    kv_tokens: NonNegativeInt = 0
    """An engine begins no further sample while its cache holds this many tokens; 0: the cache is no limit."""
    in_flight: Literal["keep", "recompute"] = "recompute"
    """As ``rollout.in_flight``."""
    checkpoint_every: NonNegativeInt = 2
    """Steps between checkpoints."""
    window_prompts: NonNegativeInt = 0
    """As ``trainer.window_prompts``."""
    ranks: PositiveInt = 1
    """As ``trainer.ranks``."""
    trainer_nodes: PositiveInt = 1
    """As ``trainer.nodes``."""
    service: str | None = None
    """As ``trainer.service``: a name among ``services``, or ``auto``."""
    priority: int = 0
    """As ``trainer.priority``."""
    share: PositiveFloat = 1.0
    """As ``trainer.share``."""
    reward_workers: PositiveInt = 1
    """Questions that verifiers answer at once."""
    no_result: Probability = 0.0
    """How often a verifier gives no verdict."""
    turns_max: NonNegativeInt = 0
    """As ``environment.turns_max``: each sample is an episode, a guessing game; 0: each prompt is answered once."""
    turn_tokens: PositiveInt | None = None
    """As ``environment.turn_tokens``."""
    environments: PositiveInt = 1
    """As ``environment.workers``."""
    episode_slots: PositiveInt = 4
    """As ``environment.slots``."""
    drift: Probability = 0.0
    """How often, in each turn, a game that is begun again says something else than before."""
    environment_fails: Probability = 0.0
    """How often an environment fails in a turn, by no doing of the model's."""

    @model_validator(mode="after")
    def _groups_fit(self) -> SimulatedJob:
        if self.group_size == 1 and not self.critic:
            raise ValueError("group_size: 2 or more, or critic: true; found 1, and a group of one has no advantage")
        return self

    def varied(self, variant: Variant) -> SimulatedJob:
        """The job with the values that ``variant`` sets."""
        return self.model_copy(update=variant.model_dump(exclude_none=True))


class Variant(Section):
    """Varies a job: what is set here replaces what the job says."""

    policy: Literal["assign", "rlboost", "planned"] | None = None
    length_ranking: Literal["none", "history", "siblings", "learned"] | None = None
    service: str | None = None
    ranks: PositiveInt | None = None
    trainer_nodes: PositiveInt | None = None
    tensor_parallel: PositiveInt | None = None
    decode_s: Seconds | None = None
    kv_tokens: NonNegativeInt | None = None
    prompts_per_step: PositiveInt | None = None
    max_running: PositiveInt | Literal["auto"] | None = None


class Costs(Section):
    """How long things take, in virtual seconds."""

    start_s: tuple[Seconds, Seconds] = (0.3, 1.0)
    """Time from the start of a process until its actors are made; drawn between the two."""
    engine_step_s: PositiveFloat = 0.25
    """Time of an engine's step, whatever it decodes."""
    prefill_s: Seconds = 0.001
    """For each token of a prefix."""
    load_s: Seconds = 0.1
    """Loading a version into an engine."""
    wake_s: Seconds = 0.0
    """Waking an engine that sleeps."""
    micro_batch_s: Seconds = 0.15
    """Forward and backward pass."""
    train_token_s: Seconds = 0.0
    """For each padded token of it."""
    train_step_s: Seconds = 0.4
    """A step of the optimizer."""
    export_s: Seconds = 0.1
    """Laying out a version."""
    save_s: Seconds = 0.3
    """Writing a checkpoint."""
    moved_byte_s: Seconds = 0.0
    """For each byte of trained state that a training service parks or resumes; a simulated job has 2,312."""
    verdict_s: tuple[Seconds, Seconds] = (0.01, 0.2)
    """For each response; drawn between the two."""
    environment_s: tuple[Seconds, Seconds] = (0.01, 0.2)
    """For each word of an environment; drawn between the two."""
    read_s: Seconds = 0.1
    """The prompts of one step."""
    disk_s: Seconds = 0.004
    """Time until the disk has confirmed a write of the journal."""


class NetworkConfig(Section):
    """Weather of every link, before any fault."""

    latency_s: Seconds = 0.0005
    jitter_s: Seconds = 0.0005
    """Uniform, on top of the latency."""
    bandwidth_bytes_s: PositiveFloat = 1.25e9
    """Bandwidth of each lane in each direction."""
    loss: Probability = 0.0
    """How often a message is lost, which breaks the link."""
    duplicate: Probability = 0.0
    """How often a message arrives twice."""


class RandomFaults(Section):
    """Faults that the seed draws."""

    faults: tuple[NonNegativeInt, NonNegativeInt] = (3, 10)
    """How many, between the two."""
    kinds: list[Kind] = Field(default_factory=lambda: list(_HEALABLE))
    """Which kinds; each is drawn as often as it is named."""
    roles: list[TargetRole] = Field(
        default_factory=lambda: ["rollout", "rollout", "rollout", "trainer", "weights", "rewards", "node"]
    )
    """Roles of the targets; each is drawn as often as it is named."""
    within_s: PositiveFloat = 15.0
    """They strike at times between the start and this, in virtual seconds; the start-up of processes counts too."""
    heal_s: tuple[Seconds, Seconds] = (0.1, 6.0)
    """How long a fault that heals lasts, drawn between the two with short ones as likely as long ones."""

    at_messages: Probability = 0.5
    """How many of them wait for the delivery of some message of the protocol and strike just then."""

    service_orders: tuple[NonNegativeInt, NonNegativeInt] = (0, 0)
    """How often an operator drains a training service, or removes one that no job names, between the two; after a while
    it serves again."""

    @model_validator(mode="after")
    def _ordered(self) -> RandomFaults:
        bounds = (("faults", self.faults), ("heal_s", self.heal_s), ("service_orders", self.service_orders))
        for name, (low, high) in bounds:
            if low > high:
                raise ValueError(f"{name} as [fewest, most]; found [{low}, {high}]")
        return self


class FaultsConfig(Section):
    """What happens to the run: a fixed plan, drawn faults, or both."""

    plan: list[Fault] = Field(default_factory=list[Fault])
    """Faults as in a fault plan file; ``at_s`` counts from when all processes are ready."""
    random: RandomFaults | None = None
    """Further ones, drawn from the seed."""


class Scenario(Section):
    """One simulated cluster and what happens to it."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,63}$")]
    """What the scenario is called."""
    jobs: Annotated[list[SimulatedJob], Field(min_length=1)]
    """One section each."""
    jobs_at_once: list[PositiveInt] = Field(default_factory=list[PositiveInt])
    """How many of ``jobs`` run: one of these numbers, drawn; which of them is drawn too. Empty: all."""
    variants: list[Variant] = Field(default_factory=list[Variant])
    """Each job that runs does so in one of these, drawn. Empty: as it stands."""
    nodes: NonNegativeInt = 2
    """Machines besides the head's."""
    slots: PositiveInt = 4
    """Rollout workers that each of them takes."""
    node_returns_s: PositiveFloat | None = 4.0
    """A machine whose agent has ended is started again after this long; unset: never."""
    head_returns_s: PositiveFloat | None = 2.0
    """The same for the machine of the head, whose jobs are then resumed."""
    spot: SpotConfig = SpotConfig()
    """Further machines that come and go as a trace says; for jobs with ``place_rollout: elastic``."""
    services: ServicesConfig | None = None
    """Training services that the head has, as in a services file; each with ``backend: simulated``."""
    costs: Costs = Costs()
    network: NetworkConfig = NetworkConfig()
    faults: FaultsConfig = FaultsConfig()
    limits: Limits = Limits()
    """Limits of all jobs and processes."""
    stall_s: PositiveFloat = 120.0
    """Nothing has moved for this long, in virtual seconds, and no fault is in force: that is a deadlock."""
    finish_within_s: PositiveFloat = 900.0
    """Virtual seconds from the last fault's end until every job must be over."""

    @model_validator(mode="after")
    def _jobs_fit(self) -> Scenario:
        names = [job.name for job in self.jobs]
        if twice := sorted({name for name in names if names.count(name) > 1}):
            raise ValueError(f"jobs with different names; found {', '.join(twice)} more than once")
        if too_many := [count for count in self.jobs_at_once if count > len(names)]:
            raise ValueError(f"jobs_at_once of at most {len(names)}, as many as there are jobs; found {too_many[0]}")
        return self

    @model_validator(mode="after")
    def _functions_fit(self) -> Scenario:
        served = [job.name for job in self.jobs if job.functions]
        if served and max(self.jobs_at_once or [len(self.jobs)]) > 1:
            raise ValueError(f"jobs_at_once: [1], since {served[0]} has functions, which are one job's")
        return self

    @model_validator(mode="after")
    def _services_fit(self) -> Scenario:
        services = [] if self.services is None else self.services.services
        if real := [service.name for service in services if service.backend != "simulated"]:
            raise ValueError(f"services with backend: simulated; {real[0]} has another one")
        names = [service.name for service in services]
        known = [AUTO, *names] if names else []
        named = [(job.name, job.service) for job in self.jobs] + [("a variant", one.service) for one in self.variants]
        if lost := [(who, service) for who, service in named if service is not None and service not in known]:
            there = ", ".join(known) or "none, as there are no services"
            raise ValueError(f"jobs whose service is one of {there}; {lost[0][0]} has {lost[0][1]}")
        return self


def job_config(job: SimulatedJob, scenario: Scenario, *, model_path: str, data_path: str, seed: int) -> JobConfig:
    """The job file that ``job`` stands for; of the files at the two paths only the end token is read."""
    costs = scenario.costs
    engine_options: dict[str, Any] = {
        "base_s": costs.engine_step_s, "decode_s": job.decode_s, "prefill_s": costs.prefill_s, "load_s": costs.load_s,
        "wake_s": costs.wake_s,
        "mean_tokens": job.mean_tokens, "by_prompt": job.by_prompt, "vocab": 64, "kv_tokens": job.kv_tokens,
    }  # fmt: skip
    sections: dict[str, Any] = {
        "name": job.name, "seed": seed, "steps": job.steps,
        "model": {"source": "hf", "path": model_path},
        "data": {"source": "jsonl", "path": data_path, "max_prompt_tokens": job.prompt_tokens},
        "reward": {"kind": None if job.turns_max else "exact_match", "workers": job.reward_workers},
        "algorithm": {"group_size": job.group_size, "prompts_per_step": job.prompts_per_step, **_rule(job)},
        "critic": {"lr": 0.1, "warmup_steps": 1} if job.critic else {},
        "rollout": {
            "engine": "simulated", "workers": job.workers, "max_tokens": job.max_tokens, "threads": 1,
            "max_running": job.max_running, "in_flight": job.in_flight, "engine_options": engine_options,
            "length_ranking": job.length_ranking, "tensor_parallel": job.tensor_parallel,
        },
        "trainer": {
            "backend": "simulated", "ranks": job.ranks, "nodes": job.trainer_nodes, "lr": 0.1, "threads": 1,
            "window_prompts": job.window_prompts, "service": job.service, "priority": job.priority, "share": job.share,
        },
        "scheduling": {
            "policy": job.policy, "plan": job.plan, "relief": job.relief,
            "workers_min": job.workers_min, "workers_max": job.workers_max, **_seeding(job),
        },
        "sync": {"mode": job.mode, "max_staleness": job.max_staleness},
        "checkpoint": {"every": job.checkpoint_every, "keep": 2},
        "cluster": {
            "place_rollout": job.place_rollout,
            "nodes": scenario.nodes if job.place_rollout == "remote" or job.trainer_nodes > 1 else 0,
        },
        "provider": {"kind": "functions", "idle_s": job.idle_s} if job.functions else {},
        "environment": _environment(job),
        "metrics": {"samples": False, "tensorboard": False},
        "limits": scenario.limits,
    }  # fmt: skip
    return JobConfig.model_validate(sections)


def _rule(job: SimulatedJob) -> dict[str, Any]:
    return {"name": "ppo", "kl_coefficient": 0.05} if job.critic else {}


_GAME: Final = "actors.environments.examples.guess_number:GuessNumber"
"""Name of a class that the checks of a job find. What simulated episodes say comes from ``supervisors/simulation``."""


def _environment(job: SimulatedJob) -> dict[str, Any]:
    if not job.turns_max:
        return {}
    return {
        "kind": "python", "path": _GAME, "turns_max": job.turns_max, "turn_tokens": job.turn_tokens,
        "workers": job.environments, "slots": job.episode_slots,
    }  # fmt: skip


def _seeding(job: SimulatedJob) -> dict[str, Any]:
    if not job.seeding:
        return {}
    return {
        "seeding": True, "seeding_first_s": job.seeding_first_s, "seeding_floor_s": job.seeding_floor_s,
        "seeding_end": job.seeding_end,
    }  # fmt: skip


def load_scenario(path: str | Path) -> Scenario:
    """The scenario in the YAML file at ``path``.

    Raises:
        ConfigError: it cannot be read, is no YAML, or does not fit; the message names line and field.
    """
    scenario = load_file(Scenario, path, holds="jobs and faults", example="configs/chaos.yaml", presets=scenario_names)
    if scenario.spot.trace is None:
        return scenario
    trace = found(scenario.spot.trace, Path(path).parent)
    return scenario.model_copy(update={"spot": scenario.spot.model_copy(update={"trace": trace})})
