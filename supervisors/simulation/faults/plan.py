"""Draws faults from a seed: kinds, targets, times and lengths."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from configs.fault_plan import KINDS, ChunkTarget, FaultBase, Target
from configs.scenario import RandomFaults

MOMENTS: Final = (
    "node.process_exited", "node.process_ready", "node.spawn", "prompts.prompts_read", "prompts.read",
    "rewards.score", "rewards.scored", "rollout.assign", "rollout.assign", "rollout.drain", "rollout.pull_version",
    "rollout.revoke", "scheduler.checkpoint_taken", "scheduler.commit_step", "scheduler.committed", "scheduler.leaving",
    "scheduler.lookup_service", "scheduler.open_step", "scheduler.register_service", "scheduler.register_worker",
    "scheduler.registered", "scheduler.service_changed", "scheduler.token_report", "scheduler.token_report",
    "scheduler.version_available", "scheduler.worker_version", "trainer.grant_groups", "trainer.step_granted",
    "weights.chunk", "weights.get_chunks", "weights.get_manifest", "weights.manifest_reply", "weights.publish",
    "weights.published", "weights.query_versions", "weights.versions",
)  # fmt: skip
"""Tags of messages at whose delivery a fault may strike."""
SERVICE_MOMENTS: Final = (
    "training.answer", "training.attach", "training.attached", "training.call", "training.call", "training.call",
    "training.committed", "training.detach",
)  # fmt: skip
"""Tags of such messages of jobs that share a training service."""
EPISODE_MOMENTS: Final = (
    "environments.begin_episodes", "scheduler.environment_registered", "scheduler.episode_ended",
    "scheduler.register_environment", "scheduler.take_turn", "scheduler.take_turn", "scheduler.turn_taken",
    "scheduler.turn_taken",
)  # fmt: skip
"""Tags of such messages of jobs with episodes."""
RANK_MOMENTS: Final = ("ranks.done", "ranks.follow", "ranks.order", "ranks.order")
"""Tags of such messages of jobs with rank groups."""
_WHOLE_MACHINE: Final = 0.2
"""Probability that killing the head takes its machine down too: then its operator resumes the run."""
_AT_AN_END: Final = ("kill", "hang", "partition", "preempt", "slow")


@dataclass(frozen=True)
class DrawnFault:
    """A fault, and the message it may wait for: critical moments are too rare to be hit by drawn times alone."""

    fault: FaultBase
    tag: str = ""
    """Tag of the message for whose next delivery the fault waits, after ``at_s``; empty: it does not wait."""
    after_s: float = 0.0
    """Seconds from that delivery to the strike."""
    hits_an_end: bool = False
    """Flag that the message's sender or receiver is hit, instead of the target that the fault names."""


def drawn_faults(
    spec: RandomFaults, rng: random.Random, *, nodes: int, ranks: bool = False, further: Sequence[str] = ()
) -> list[DrawnFault]:
    """Draw as many faults as ``spec.faults`` allows, in the order of their times.

    Args:
        ranks: whether any process leads a rank group; where none does, role ``rank`` is not drawn.
        further: moments besides ``MOMENTS``.
    """
    if not ranks:
        spec = spec.model_copy(update={"roles": [role for role in spec.roles if role != "rank"]})
    count = rng.randint(*spec.faults)
    at_s = sorted(rng.uniform(0.0, spec.within_s) for _ in range(count))
    faults = [_drawn(spec, rng, time_s, nodes) for time_s in at_s]
    return [_timed(fault, spec, rng, [*MOMENTS, *further]) for fault in faults]


def _timed(fault: FaultBase, spec: RandomFaults, rng: random.Random, moments: Sequence[str]) -> DrawnFault:
    if rng.random() >= spec.at_messages:
        return DrawnFault(fault)
    ends = fault.target.form == "role" and fault.kind in _AT_AN_END and rng.random() < 0.5
    return DrawnFault(fault, rng.choice(moments), rng.choice([0.0, 0.0, 0.0005, 0.002, 0.05]), ends)


def _drawn(spec: RandomFaults, rng: random.Random, at_s: float, nodes: int) -> FaultBase:
    name = rng.choice(spec.kinds)
    kind = KINDS[name]
    values: dict[str, Any] = {"kind": name, "at_s": round(at_s, 4), "target": _target(kind, spec, rng, nodes)}
    if "heal_after_s" in kind.model_fields:
        values["heal_after_s"] = _length_s(spec, rng)
    values |= _details(name, rng)
    return kind.model_validate(values)


def _target(kind: type[FaultBase], spec: RandomFaults, rng: random.Random, nodes: int) -> Target:
    name = kind.model_fields["kind"].default
    if "chunk" in kind.HITS:
        return Target(chunk=ChunkTarget(where=rng.choice(["segment", "served"])))
    roles = [role for role in spec.roles if role in kind.ROLES and (role != "node" or nodes)]
    if name == "preempt":  # a head takes it as an operator's order to end the run
        roles = [role for role in roles if role != "head"]
    if name == "disk_full" and "train_service" in roles:
        return Target(role="train_service")
    if name == "disk_full" or not roles:
        return Target(role="scheduler") if "scheduler" in kind.ROLES else Target(role="rollout")
    if "link" in kind.HITS and rng.random() < 0.5:
        one, other = rng.choice(roles), rng.choice(["head", "head", *roles])
        if one != other:
            return Target(link=(_end(one, rng, nodes), _end(other, rng, nodes)))
    role = rng.choice(roles)
    if role == "head" and name == "kill" and rng.random() < _WHOLE_MACHINE:
        return Target(node="head")
    return Target.model_validate({"role": role})


def _end(role: str, rng: random.Random, nodes: int) -> str:
    """An end of a link: the name of a role, or of a node."""
    return f"node-{rng.randint(1, nodes)}" if role == "node" else role


def _length_s(spec: RandomFaults, rng: random.Random) -> float:
    low, high = (max(bound, 0.001) for bound in spec.heal_s)
    return round(math.exp(rng.uniform(math.log(low), math.log(high))), 4)


def _details(name: str, rng: random.Random) -> dict[str, Any]:
    match name:
        case "slow":
            return {"factor": round(rng.uniform(2.0, 20.0), 2)}
        case "drop" | "duplicate":
            return {"probability": rng.choice([0.01, 0.05, 0.2] if name == "drop" else [0.05, 0.3])}
        case "delay":
            return {
                "delay_ms": round(rng.uniform(5.0, 800.0), 1),
                "jitter_ms": round(rng.uniform(0.0, 300.0), 1),
                "probability": rng.choice([0.1, 1.0]),
            }
        case "preempt":
            return {"notice_s": rng.choice([0.0, 0.5, 5.0]), "grace_s": rng.choice([0.2, 2.0, 15.0])}
        case "clock":
            return {"jump_s": rng.choice([-3600.0, -1.0, 1.0, 86400.0])}
        case _:
            return {}
