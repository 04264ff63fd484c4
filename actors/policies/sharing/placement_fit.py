"""Whether a job has room on a service, and in words what is missing: bytes, a place, quiet, or a service of its own.

    never_fits    no service will ever hold it, or its quota forbids it ─▶ refused
    lack          what it waits for on one service, beside the jobs that are there
    quota_lack    what it waits for on any service

A job that names its service needs bytes and a place alone: its user has chosen to share. For a job that the placement
puts somewhere, duty and everyone's predicted slowdown are bounded too; it runs its first steps alone, and joins no job
that still does.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from actors.policies.sharing.job_profile import Together, predict
from actors.policies.sharing.placement_view import JobView, PlacementRules, ServiceView


class Lack(NamedTuple):
    """Says what a job waits for; of two, the smaller is likely to be over sooner."""

    rank: int
    amount: float
    text: str
    """Words that follow "waits for"."""

    @property
    def wants_an_empty_service(self) -> bool:
        return self.rank == _EMPTY

    @property
    def was_predicted(self) -> bool:
        return self.rank == _SLOW


_BYTES, _PLACE, _EMPTY, _COLD, _BUSY, _SLOW, _DRAINING = range(7)


def is_cold(job: JobView, rules: PlacementRules) -> bool:
    """Whether the profile of ``job`` has to be known and is not yet."""
    return job.named is None and job.profile.steps < rules.cold_steps


def size(count: float) -> str:
    """A number of bytes, for people."""
    return f"{count / 1e9:.3g} GB" if count >= 1e8 else f"{count / 1e6:.3g} MB"


# ------------------------------------------------------------ never


def never_fits(job: JobView, candidates: Sequence[ServiceView], rules: PlacementRules) -> str | None:
    """Why ``job`` can never be placed; ``candidates``: services that suit it, whether they are full or not."""
    if not candidates:
        return f"service {job.named} is not there" if job.named else "no service suits it"
    of_project = rules.quota(job.project).memory_bytes
    if of_project is not None and job.state_bytes > of_project:
        allowed = f"the quota of project {job.project} is {size(of_project)}"
        return f"its trained state needs {size(job.state_bytes)}, and {allowed}: raise quotas.memory_bytes"
    largest = max(candidates, key=lambda service: min(service.memory_bytes, service.parked_bytes))
    room = min(largest.memory_bytes, largest.parked_bytes)
    if job.state_bytes <= room:
        return None
    which = "the one with most room" if len(candidates) > 1 else "the one that suits it"
    has = f"{largest.name}, {which}, has {size(room)}"
    return f"its trained state needs {size(job.state_bytes)}, and {has}: raise memory_bytes and host_bytes there"


# ------------------------------------------------------------ not now


def quota_lack(job: JobView, of_project: Sequence[JobView], rules: PlacementRules) -> Lack | None:
    """What is missing in the quota of the job's project; ``of_project``: its jobs that are on services."""
    quota = rules.quota(job.project)
    if quota.jobs_max is not None and len(of_project) >= quota.jobs_max:
        return Lack(_PLACE, 0.0, f"a job of project {job.project} to end: its quota is {quota.jobs_max}")
    if quota.memory_bytes is not None:
        over = sum(one.state_bytes for one in of_project) + job.state_bytes - quota.memory_bytes
        if over > 0:
            return Lack(_BYTES, over, f"{size(over)} in the quota of project {job.project}")
    return None


def lack(job: JobView, service: ServiceView, there: Sequence[JobView], rules: PlacementRules) -> Lack | Together | None:
    """What ``job`` waits for on ``service`` beside the jobs ``there``; else the prediction, None if none is there."""
    name = service.name
    if service.draining:
        return Lack(_DRAINING, 0.0, f"another service than {name}, which takes no further job")
    missing = max(
        job.state_bytes - service.memory_bytes,
        sum(one.state_bytes for one in there) + job.state_bytes - service.parked_bytes,
    )
    if missing > 0:
        return Lack(_BYTES, missing, f"{size(missing)} on {name}")
    if len(there) >= service.jobs_max:
        return Lack(_PLACE, 0.0, f"a place on {name}, which serves {len(there)} jobs of {service.jobs_max}")
    if not there:
        return None
    recluse = next((one.name for one in there if one.alone), None)
    if recluse is not None:
        return Lack(_PLACE, 0.0, f"a place on {name}, where {recluse} runs alone because services died under it")
    if job.alone:
        return Lack(_EMPTY, 0.0, "a service of its own, because services died under it")
    if job.named is not None:
        return None
    return _lack_of_quiet(job, service, there, rules)


def _lack_of_quiet(
    job: JobView, service: ServiceView, there: Sequence[JobView], rules: PlacementRules
) -> Lack | Together:
    if rules.policy == "isolated":
        return Lack(_EMPTY, 0.0, "a service that serves nobody, as placement is isolated")
    if is_cold(job, rules):
        return Lack(_EMPTY, 0.0, f"a service of its own for its first {rules.cold_steps} steps")
    unknown = next((one.name for one in there if one.profile.steps < rules.cold_steps), None)
    if unknown is not None:
        return Lack(_COLD, 0.0, f"{unknown} on {service.name} to have run {rules.cold_steps} steps")
    duty = job.profile.duty + sum(one.profile.duty for one in there)
    if duty > rules.duty_max:
        busy = f"would compute for {duty:.0%} of the time where {rules.duty_max:.0%} are allowed"
        return Lack(_BUSY, duty, f"quiet on {service.name}, which {busy}")
    needed = job.state_bytes + sum(one.state_bytes for one in there)
    together = predict([one.profile for one in there], job.profile, switches=needed > service.memory_bytes)
    if together.worst > rules.slowdown_max:
        slowest = [*there, job][together.slowdowns.index(together.worst)].name
        slow = f"a step of {slowest} would take {together.worst:.2f} times as long where {rules.slowdown_max:.2f}"
        return Lack(_SLOW, together.worst, f"quiet on {service.name}, where {slow} are allowed")
    return together
