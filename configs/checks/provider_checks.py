"""What the schema cannot see of the job file's ``provider`` section, and of what it needs from others."""

from __future__ import annotations

import math
import re
import shlex
from pathlib import Path
from typing import Final

from configs.checks.kubernetes_checks import check_kubernetes
from configs.provider_schema import ProviderConfig, SpotConfig
from configs.schema import JobConfig

Found = tuple[str, str, str]
"""Field, what is wrong, what to do: as in ``configs.checks.checks``."""

_TRACE_KEYS = tuple(SpotConfig.model_fields)
_FUNCTION_KEYS = ("machines", "idle_s", "bill_rounding_s", "asleep_price", "prewarm_buffer_s")
_FOREIGN: Final = {
    "none": (*_TRACE_KEYS, "slots", *_FUNCTION_KEYS, "slurm", "kubernetes"),
    "local": (*_FUNCTION_KEYS, "slurm", "kubernetes"),
    "functions": (*_TRACE_KEYS, "slurm", "kubernetes"),
    "slurm": ("trace", "speed", *_FUNCTION_KEYS, "kubernetes"),
    "kubernetes": ("trace", "speed", *_FUNCTION_KEYS, "slurm"),
}
"""Kind → the keys of the section that say nothing to it."""
_TIME: Final = re.compile(r"\d+(:\d\d){0,2}|\d+-\d+(:\d\d){0,2}|infinite|unlimited", re.IGNORECASE)
_OURS: Final = re.compile(
    r"-[JnNaWHM]|--(job-name|comment|nodes|ntasks|array|requeue|no-requeue|wrap|parsable|test-only|wait|hold|signal"
    r"|clusters?)(=|$)"
)
"""Options of sbatch that make a job one machine, or by which a run knows its own."""


def check_provider(job: JobConfig) -> list[Found]:
    """The trace itself is read when the run begins."""
    provider, cluster, default = job.provider, job.cluster, ProviderConfig()
    said = ("slurm", "notice_s") if provider.asks_slurm else ()
    foreign = [name for name in _FOREIGN[provider.kind] if name not in said]
    others = [name for name in foreign if getattr(provider, name) != getattr(default, name)]
    right = "functions" if others and others[0] in _FUNCTION_KEYS else "local"
    right = others[0] if others and others[0] in ("slurm", "kubernetes") else right
    fix = f"Set provider.kind to {right}, or leave {'the section' if provider.kind == 'none' else 'it'} out"
    found = [(f"provider.{name}", f"is set, but provider.kind is {provider.kind}", fix) for name in others[:1]]
    if provider.kind == "none":
        return found
    if cluster.place_rollout != "elastic":
        wrong = f"{cluster.place_rollout}, but provider.kind is {provider.kind}: its machines would get no workers"
        found.append(("cluster.place_rollout", wrong, "Set it to elastic"))
    if provider.brings_hosts:
        found += [*_check_hosts(job), *(_check_slurm(job) if provider.asks_slurm else [])]
    if provider.kind == "functions":
        return [*found, *_check_functions(job)]
    if provider.kind == "kubernetes":
        return [*found, *check_kubernetes(provider.kubernetes)]
    if provider.kind == "slurm":
        return found
    if provider.trace is None:
        found.append(("provider.trace", "is missing, and provider.kind is local", "Name a file; see configs/traces"))
    elif not Path(provider.trace).is_file():
        fix = "Check the path; some lie in configs/traces"
        found.append(("provider.trace", f"{provider.trace}: there is no such file", fix))
    return found


def _check_hosts(job: JobConfig) -> list[Found]:
    """What machines on other hosts need."""
    provider, listen = job.provider, job.cluster.listen
    found: list[Found] = []
    if provider.nodes_max is None and provider.kind != "functions":
        wrong = f"is missing, and provider.kind is {provider.kind}"
        found.append(("provider.nodes_max", wrong, "Say how many machines are wanted at most"))
    if listen.removeprefix("tcp://").startswith(("127.", "localhost:", "[::1]:")):
        wrong = f"{listen} is reached from the head's machine only, and provider.kind is {provider.kind}"
        found.append(("cluster.listen", wrong, "Set it to tcp://0.0.0.0:7001, and start with --keys"))
    return found


def _check_slurm(job: JobConfig) -> list[Found]:
    slurm, leave_s = job.provider.slurm, job.provider.notice_s + job.limits.stop_timeout_s
    found: list[Found] = []
    if slurm.time_limit is not None and not _TIME.fullmatch(slurm.time_limit):
        fix = 'Write minutes, h:mm:ss, days-hours or days-hours:mm, in quotes, such as "4:00:00"'
        found.append(("provider.slurm.time_limit", f"{slurm.time_limit!r} is no time limit of Slurm", fix))
    elif slurm.time_limit is not None and _limit_s(slurm.time_limit) <= leave_s:
        wrong = f"{slurm.time_limit} is over as it begins: machines are told to go {leave_s:g} s before its end"
        found.append(("provider.slurm.time_limit", wrong, "Raise it, or lower provider.notice_s"))
    for line in slurm.sbatch:
        try:
            words = shlex.split(line)
        except ValueError as error:
            found.append(("provider.slurm.sbatch", f"{line!r} cannot be read: {error}", "Correct the quotes"))
            continue
        if not line.startswith("-"):
            wrong = f"{line!r} is no option of sbatch"
            found.append(("provider.slurm.sbatch", wrong, "Write options only, without #SBATCH, such as --gres=gpu:4"))
        elif ours := next((word for word in words if _OURS.match(word)), ""):
            wrong = f"{ours} is set by Headrace, for which each machine is a job of one node"
            found.append(("provider.slurm.sbatch", wrong, "Remove it; provider.nodes_max says how many"))
    return found


def _limit_s(text: str) -> float:
    """A time limit as ``sbatch`` reads it: minutes, minutes:seconds, h:mm:ss, or days and then hours first."""
    if not text[0].isdigit():
        return math.inf
    days, dash, rest = text.rpartition("-")
    parts = [int(part) for part in rest.split(":")]
    units = (3600, 60, 1) if dash or len(parts) == 3 else (60, 1)
    limit_s = int(days or 0) * 86400 + sum(part * unit for part, unit in zip(parts, units, strict=False))
    return limit_s or math.inf  # to Slurm, 0 is none


def _check_functions(job: JobConfig) -> list[Found]:
    """What planned generation asks for itself is said by its own checks."""
    provider, scheduling, mode = job.provider, job.scheduling, job.sync.mode
    found: list[Found] = []
    if provider.slots != 1:
        wrong = f"{provider.slots}, but provider.kind is functions, and each function is a machine of one worker"
        found.append(("provider.slots", wrong, "Set it to 1"))
    if scheduling.policy != "planned":
        wrong = f"{scheduling.policy}, but provider.kind is functions: only a plan says when one is needed"
        found.append(("scheduling.policy", wrong, "Set it to planned, or provider.kind to local or none"))
        if mode not in ("sync", "minibatch"):
            wrong = f"{mode}, but provider.kind is functions, which pay off only while nobody generates between steps"
            found.append(("sync.mode", wrong, "Set it to sync or minibatch"))
        if scheduling.seeding:
            wrong = "is set, but provider.kind is functions: a plan says who generates and who sleeps"
            found.append(("scheduling.seeding", wrong, "Remove it"))
    if scheduling.workers_max is not None and job.rollout.workers >= scheduling.workers_max:
        wrong = f"{job.rollout.workers} leaves no function, since scheduling.workers_max is {scheduling.workers_max}"
        found.append(("rollout.workers", wrong, "Lower it (0: all are functions), or raise workers_max"))
    return found
