"""The fault vocabulary, typed: what a plan file, ``headrace ctl inject`` and a test may do to a run, real or simulated.

    PLAN.yaml ─▶ load_fault_plan ─▶ ┐
    ctl inject ─▶ fault_from_mapping ▶ Fault ─▶ nemesis (real processes) or simulation (virtual time)
    tests, generators ─▶ Kill(...) ─▶ ┘

    seed: 7
    faults:
      - {kind: kill, target: {role: rollout}, after_step: 2}
      - {kind: hang, target: {name: trainer}, at_s: 12.5, heal_after_s: 4}
      - {kind: drop, target: {link: [head, rollout-0]}, at_s: 20, probability: 0.05, heal_after_s: 10}

Invariants
- A fault against a target that its kind cannot hit is refused when it is read, with the field's name.
- A key that is left out has one meaning: without a time, at once; without ``heal_after_s``, for good.
- Whatever is drawn (which worker of a role, which message, which chunk) comes from the plan's seed and the fault's
  place in the list, so that equal seeds draw alike.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, ClassVar, Final, Literal

from pydantic import Field, field_validator, model_validator

from configs.schema import NonNegativeInt, PositiveFloat, PositiveInt, Section
from configs.validation import Where, load_file, validate

Kind = Literal[
    "kill", "hang", "slow", "partition", "drop", "delay", "duplicate", "corrupt", "preempt", "disk_full", "clock",
    "out_of_memory",
]  # fmt: skip
Role = Literal[
    "rollout", "trainer", "rank", "weights", "rewards", "gateway", "environments", "train_service", "scheduler", "node",
    "head",
]  # fmt: skip
Seconds = Annotated[float, Field(ge=0)]
Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,127}$")]

PROCESS: Final = ("role", "name", "node")
MESSAGES: Final = (*PROCESS, "link")


class ChunkTarget(Section):
    """One chunk of one version of the weights."""

    version: NonNegativeInt | None = None
    """The policy version; unset: the newest when the fault strikes."""
    index: NonNegativeInt | None = None
    """Which chunk; unset: drawn by the seed. Counted modulo the number of chunks."""
    where: Literal["segment", "served"] = "segment"
    """``segment``: the file in shared memory that workers map; ``served``: the copy that is streamed to others."""


class Target(Section):
    """Says what a fault hits, by exactly one of the first five keys."""

    role: Role | None = None
    """``count`` processes of this role, drawn by the seed. ``rank``: those that a trainer or a rollout worker leads;
    ``node``: node agents; ``scheduler``: the journal's disk; ``train_service``: training services, in simulations only,
    and by ``disk_full`` the tiers of their stored states."""
    name: Name | None = None
    """One process, by its actor's name: ``rollout-0``, ``trainer``, ``trainer.rank1``."""
    node: Name | None = None
    """One machine that has joined: its node agent, with which its processes end. Not the head's own machine."""
    link: tuple[Name, Name] | None = None
    """Messages between two ends, both ways; each end is a name, a role or a node. ``head`` is the head process."""
    chunk: ChunkTarget | None = None
    """A chunk of the weights."""
    count: PositiveInt = 1
    """How many processes of ``role``; all of them if there are fewer."""
    job: Name | None = None
    """Whose; unset: of the only job. Of several real ones it is to be named, except for the head or a node as the
    target, which are all jobs'; in simulations it may be any."""

    @property
    def form(self) -> str:
        """The key that says what is hit: role, name, node, link or chunk."""
        return next(form for form in FORMS if getattr(self, form) is not None)

    @model_validator(mode="after")
    def _exactly_one(self) -> Target:
        given = [form for form in FORMS if getattr(self, form) is not None]
        if len(given) != 1:
            found = f"found {' and '.join(given)}" if given else "found none"
            raise ValueError(f"exactly one of {', '.join(FORMS)}; {found}")
        if self.count != 1 and self.role is None:
            raise ValueError("count to go with role only")
        if self.link is not None and self.link[0] == self.link[1]:
            raise ValueError(f"a link between two different ends, not twice {self.link[0]}")
        return self

    def __str__(self) -> str:
        value = getattr(self, self.form)
        if isinstance(value, ChunkTarget):
            of = "the newest version" if value.version is None else f"version {value.version}"
            value = f"{'any' if value.index is None else value.index} of {of} ({value.where})"
        shown = "-".join(value) if isinstance(value, tuple) else str(value)
        return f"{self.form} {shown}{f' x{self.count}' if self.count > 1 else ''}"


FORMS: Final = ("role", "name", "node", "link", "chunk")


class FaultBase(Section):
    """All kinds have this in common: when the fault strikes, and how often."""

    HITS: ClassVar[tuple[str, ...]] = PROCESS
    """Forms of target that this kind can hit."""
    ROLES: ClassVar[tuple[str, ...]] = (
        "rollout", "trainer", "rank", "weights", "rewards", "gateway", "environments", "train_service", "node", "head",
    )  # fmt: skip
    """Roles that this kind can hit."""

    kind: Any  # one literal in each kind; first, since it tells the kinds apart
    """One of the kinds below."""
    target: Target
    """The target, which its kind must be able to hit."""
    at_s: Seconds | None = None
    """The seconds after the run's processes were ready. Neither this nor ``after_step``: at once."""
    after_step: NonNegativeInt | None = None
    """The number of committed steps at which it strikes; with ``at_s``, that many seconds later."""
    times: PositiveInt = 1
    """The number of strikes."""
    every_s: PositiveFloat | None = None
    """The seconds from one strike to the next."""

    @property
    def delay_after_trigger_s(self) -> float:
        """Seconds between the trigger (processes ready, or the step) and the first strike."""
        return self.at_s or 0.0

    @field_validator("target", mode="after")
    @classmethod
    def _can_be_hit(cls, target: Target) -> Target:
        kind = cls.model_fields["kind"].default
        if target.form not in cls.HITS:
            raise ValueError(f"something that {kind} can hit: {', '.join(cls.HITS)}; not a {target.form}")
        if target.role is not None and target.role not in cls.ROLES:
            raise ValueError(f"a role that {kind} can hit: {', '.join(cls.ROLES)}; not {target.role}")
        return target

    @model_validator(mode="after")
    def _strikes_are_spaced(self) -> FaultBase:
        if self.times > 1 and self.every_s is None:
            raise ValueError("every_s beside times: how long from one strike to the next")
        if self.every_s is not None and self.times == 1:
            raise ValueError("times beside every_s: how many strikes")
        return self


class HealingFault(FaultBase):
    """A fault that ends."""

    heal_after_s: PositiveFloat | None = None
    """The seconds that it lasts; unset: for good."""


class Kill(FaultBase):
    """A process ends without a word.

    Real: SIGKILL. A node's processes end with its agent; a head is started again and takes over what runs.
    Simulated: the process is gone between two events; what it had sent is still under way.
    """

    kind: Literal["kill"] = "kill"


class Hang(HealingFault):
    """A process stands still, its memory and connections intact.

    Real: SIGSTOP, and SIGCONT after ``heal_after_s`` if it still lives: whoever owns it may have killed it by then.
    Simulated: it handles nothing, and sends no heartbeat, until it is healed.
    """

    kind: Literal["hang"] = "hang"


class Slow(HealingFault):
    """A process gets on, but slowly. It must not be taken for a hung one.

    Real: its node agent stops and continues it many times a second, so that it runs one part in ``factor``.
    Simulated: whatever its engine, backend or handlers take, takes ``factor`` times as long.
    """

    HITS = ("role", "name")
    ROLES = ("rollout", "trainer", "rank", "weights", "rewards", "gateway", "environments", "train_service")

    kind: Literal["slow"] = "slow"
    factor: Annotated[float, Field(gt=1, le=100)] = 4.0
    """How many times slower the process gets."""


class LinkFault(HealingFault):
    """A fault of messages. A process as the target means all its links."""

    HITS = MESSAGES

    lane: Literal["signal", "message", "bulk"] | None = None
    """The only lane whose messages are hit; unset: all."""


class Partition(HealingFault):
    """Nothing passes, in either direction; to both ends the other one looks silent.

    Real: the transports at both ends hold everything back and refuse new connections to each other; after the
    heartbeat time-out the link is down. Simulated: the network does the same.
    """

    HITS = MESSAGES

    kind: Literal["partition"] = "partition"


class Drop(LinkFault):
    """Messages vanish. A link never hides a gap, so each loss breaks the link; it is made anew.

    Real: the sending end does not send it, and breaks the link at the next message of that lane, or after the heartbeat
    time-out. Simulated: the network loses it.
    """

    kind: Literal["drop"] = "drop"
    probability: Annotated[float, Field(gt=0, le=1)] = 0.01
    """The chance of each message to be hit."""


class Delay(LinkFault):
    """Messages are late, in order.

    Real: held back at the sending end. Simulated: the network's latency grows.
    """

    kind: Literal["delay"] = "delay"
    delay_ms: Annotated[float, Field(gt=0, le=60_000)] = 100.0
    """The delay of each message that is hit."""
    jitter_ms: Annotated[float, Field(ge=0, le=60_000)] = 0.0
    """The most that is added to it, drawn for each message."""
    probability: Annotated[float, Field(gt=0, le=1)] = 1.0
    """The chance of each message to be hit."""


class Duplicate(LinkFault):
    """Messages arrive twice.

    Real: sent twice with the same number. Simulated: the network repeats it.
    """

    kind: Literal["duplicate"] = "duplicate"
    probability: Annotated[float, Field(gt=0, le=1)] = 0.1
    """The chance of each message to be hit."""


class Corrupt(HealingFault):
    """A bit of a weight chunk is wrong. The chunk's hash must find it: wrong weights are never served.

    Real: ``segment`` replaces the file in shared memory by a copy with one bit flipped, so that those who have mapped
    and verified it keep the right bytes; ``served`` flips a bit of each streamed copy of the chunk.
    Simulated: whoever pulls the chunk gets it with a wrong hash.
    """

    HITS = ("chunk",)

    kind: Literal["corrupt"] = "corrupt"


class Preempt(FaultBase):
    """A machine or process is taken away with a notice, as cloud providers and batch systems do.

    Real: a drain order with the deadline, SIGTERM after ``notice_s``, SIGKILL ``grace_s`` later to what is still there.
    With ``notice_s`` 0 the SIGTERM is the notice. The head takes it as Ctrl-C: a checkpoint, then the end.
    Simulated: the same orders at the same times.
    """

    kind: Literal["preempt"] = "preempt"
    notice_s: Seconds = 5.0
    """The seconds from the notice to SIGTERM."""
    grace_s: Seconds = 5.0
    """The seconds from SIGTERM to SIGKILL."""


class DiskFull(HealingFault):
    """The disk of the journal takes nothing more: writes fail with ENOSPC. Without ``heal_after_s`` the job fails.

    Real: the journal's transactions fail in the head, and so does opening it anew. Simulated: the same; with the role
    ``train_service`` a tier in which a training service stores states takes nothing more, or both do.
    """

    HITS = ("role",)
    ROLES = ("scheduler", "train_service")

    kind: Literal["disk_full"] = "disk_full"
    target: Target = Target(role="scheduler")
    """The scheduler, whose journal it is, or training services."""


class Clock(HealingFault):
    """The wall clock of a process jumps, as after a correction. Deadlines go by the monotonic clock and must not care.

    Real: ``time.time`` of the process is shifted. Simulated: the wall clock that it sees is.
    """

    kind: Literal["clock"] = "clock"
    jump_s: float = 3600.0
    """The jump, forward, or back if negative."""

    @field_validator("jump_s", mode="after")
    @classmethod
    def _jumps(cls, value: float) -> float:
        if value == 0:
            raise ValueError("a number other than 0")
        return value


class OutOfMemory(FaultBase):
    """The next micro-batch of several samples finds no memory; the trainer halves it, and repeats the step.

    Real: the micro-batch is computed, and fails when its gradients are in the sums. Simulated: the same; with the role
    ``train_service`` that of whichever job comes next.
    """

    HITS = ("role", "name")
    ROLES = ("trainer", "train_service")

    kind: Literal["out_of_memory"] = "out_of_memory"


Fault = Annotated[
    Kill | Hang | Slow | Partition | Drop | Delay | Duplicate | Corrupt | Preempt | DiskFull | Clock | OutOfMemory,
    Field(discriminator="kind"),
]

KINDS: Final[dict[str, type[FaultBase]]] = {
    str(kind.model_fields["kind"].default): kind
    for kind in (Kill, Hang, Slow, Partition, Drop, Delay, Duplicate, Corrupt, Preempt, DiskFull, Clock, OutOfMemory)
}


class FaultPlan(Section):
    """Holds faults in the order of their numbers; each says itself when it strikes."""

    seed: NonNegativeInt = 0
    """The seed of whatever is drawn."""
    faults: list[Fault]
    """The faults, one section each."""


class _OneFault(Section):
    fault: Fault


def load_fault_plan(path: str | Path) -> FaultPlan:
    """The plan in the YAML file at ``path``.

    Raises:
        ConfigError: it cannot be read, is no YAML, or does not fit the vocabulary; the message names line and field.
    """
    return load_file(FaultPlan, path, holds="seed and faults", example="docs/guides/fault_injection.md")


def fault_from_mapping(values: Mapping[str, Any], where: str = "the fault") -> FaultBase:
    """One fault from a plain map, such as ``{"kind": "kill", "target": {"name": "rollout-0"}}``.

    Raises:
        ConfigError: as load_fault_plan, with ``where`` in place of the file's name; fields are named ``fault.…``.
    """
    place: Where = lambda _: where  # noqa: E731 - a name for what it is
    return validate(_OneFault, {"fault": dict(values)}, place).fault


def dump_fault(fault: FaultBase) -> dict[str, Any]:
    """The fault as a plain map, which ``fault_from_mapping`` turns back; keys that were not set are left out."""
    return fault.model_dump(mode="json", exclude_none=True, exclude_unset=True) | {"kind": fault.kind}
