"""Random fault plans for runs of real processes: two to four faults each, of every kind that matters, on every role.

And what the jobs that they strike are like: their modes, for every second one a seeding window, for every fifth one a
trainer of two ranks.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

ROLES = ("rollout", "trainer", "weights", "rewards", "head")
RANKS = ("rank", "rank", "trainer")
"""Further roles, where the trainer has several ranks."""
STEPS = 60


def has_ranks(seed: int) -> bool:
    return seed % 5 == 3


def random_plan(seed: int) -> list[dict[str, Any]]:
    """Equal seeds give equal plans. Each strikes within the first two thirds of ``STEPS`` steps."""
    draw = random.Random(f"plan {seed}")
    roles = ROLES + RANKS * has_ranks(seed)
    faults = [_fault(draw, roles) for _ in range(draw.randint(2, 4))]
    if has_ranks(seed):
        faults[0] = {"kind": draw.choice(("kill", "hang")), "target": {"role": "rank"}}
    for fault in faults:
        fault["after_step"] = draw.randrange(1, STEPS * 2 // 3)
        fault["at_s"] = round(draw.uniform(0, 0.05), 4)
    return faults


def random_job(seed: int, trace: Path) -> dict[str, Any]:
    """Sections of a job; equal seeds give equal ones. ``trace``: a file for the machines that come, if any do."""
    draw = random.Random(f"job {seed}")
    common: dict[str, Any] = {"sync": {"mode": "async" if seed % 2 else "sync", "max_staleness": 1 + seed % 3}}
    if has_ranks(seed):
        common["trainer"] = {"backend": "fsdp", "ranks": 2, "lr": 1e-3, "threads": 1}
    if draw.random() < 0.5:
        return common
    seeding = {
        "policy": draw.choice(("assign", "rlboost")),
        "seeding": True,
        "seeding_first_s": draw.choice((0.2, 1.0)),
        "seeding_floor_s": 0.1,
    }
    if draw.random() < 0.3:
        return common | {"scheduling": seeding, "cluster": {"place_rollout": "local"}}
    ends = draw.choice(("", "20,a,kill,spot\n", "20,a,notice,spot\n23,a,kill,spot\n"))
    trace.write_text(f"at_s,node,event,kind\n0,a,up,spot\n{ends}")
    provider = {"kind": "local", "trace": str(trace)}
    return common | {"scheduling": seeding, "cluster": {"place_rollout": "elastic"}, "provider": provider}


def _fault(draw: random.Random, roles: tuple[str, ...]) -> dict[str, Any]:
    kind = draw.choice(("kill", "kill", "hang", "hang", "partition", "drop", "corrupt", "disk_full", "preempt"))
    if kind in ("kill", "hang"):
        return {"kind": kind, "target": {"role": draw.choice(roles)}}
    if kind in ("partition", "drop"):
        ranks = ("trainer.rank1",) if "rank" in roles else ()
        link = ["head", draw.choice(("rollout-0", "rollout-1", "trainer", "weights", "rewards", *ranks))]
        part = {"probability": draw.choice((0.05, 0.3))} if kind == "drop" else {}
        return {"kind": kind, "target": {"link": link}, "heal_after_s": round(draw.uniform(0.3, 3), 2), **part}
    if kind == "corrupt":
        return {"kind": kind, "target": {"chunk": {}}}
    if kind == "disk_full":
        return {"kind": kind, "heal_after_s": round(draw.uniform(0.1, 1.5), 2)}
    notice_s = draw.choice((0, 0.5, 2))
    role = draw.choice(tuple(role for role in roles if role != "head"))
    return {"kind": kind, "target": {"role": role}, "notice_s": notice_s, "grace_s": draw.choice((0.2, 2))}
