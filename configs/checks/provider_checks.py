"""Checks of the job file's ``provider`` section beyond the schema, and of what it needs from other sections. Only the
cluster can tell whether an image or a volume claim exists.
"""

from __future__ import annotations

import math
import re
import shlex
from pathlib import Path
from typing import Final

from configs.errors import Found
from configs.kubernetes_schema import KubernetesConfig, Quantity
from configs.provider_schema import ProviderConfig, SpotConfig
from configs.schema import JobConfig

_TRACE_KEYS = tuple(SpotConfig.model_fields)
_FUNCTION_KEYS = ("machines", "idle_s", "bill_rounding_s", "asleep_price", "prewarm_buffer_s")
_FOREIGN: Final = {
    "none": (*_TRACE_KEYS, "slots", *_FUNCTION_KEYS, "slurm", "kubernetes"),
    "local": (*_FUNCTION_KEYS, "slurm", "kubernetes"),
    "functions": (*_TRACE_KEYS, "slurm", "kubernetes"),
    "slurm": ("trace", "speed", *_FUNCTION_KEYS, "kubernetes"),
    "kubernetes": ("trace", "speed", *_FUNCTION_KEYS, "slurm"),
}
"""Kind → the keys of the section that it does not read."""
_TIME: Final = re.compile(r"\d+(:\d\d){0,2}|\d+-\d+(:\d\d){0,2}|infinite|unlimited", re.IGNORECASE)
_OURS: Final = re.compile(
    r"-[JnNaWHM]|--(job-name|comment|nodes|ntasks|array|requeue|no-requeue|wrap|parsable|test-only|wait|hold|signal"
    r"|clusters?)(=|$)"
)
"""Options of sbatch that Headrace sets: they make a job one machine, or let a run find its own jobs."""


def check_provider(job: JobConfig) -> list[Found]:
    """Problems of the section. The trace itself is read when the run begins."""
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
    """Problems of a job whose machines are on other hosts."""
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
    """Seconds of a time limit of ``sbatch``: minutes, minutes:seconds, h:mm:ss, or days-hours[:mm[:ss]]."""
    if not text[0].isdigit():
        return math.inf
    days, dash, rest = text.rpartition("-")
    parts = [int(part) for part in rest.split(":")]
    units = (3600, 60, 1) if dash or len(parts) == 3 else (60, 1)
    limit_s = int(days or 0) * 86400 + sum(part * unit for part, unit in zip(parts, units, strict=False))
    return limit_s or math.inf  # to Slurm, 0 means no limit


def _check_functions(job: JobConfig) -> list[Found]:
    """Problems of machines that are functions; ``check_scheduling`` finds those of planned generation."""
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


_QUANTITY: Final = re.compile(r"\d+(\.\d+)?([mkMGTPE]|[KMGTPE]i)?")
_OUR_LABELS: Final = "headrace/"
_SECTION: Final = "provider.kubernetes"


def check_kubernetes(kubernetes: KubernetesConfig | None) -> list[Found]:
    """Problems of the section ``provider.kubernetes``."""
    if kubernetes is None:
        return [(_SECTION, "is missing, and provider.kind is kubernetes", "Add it; image is the least that it needs")]
    found: list[Found] = []
    if kubernetes.keys_secret is None:
        wrong = "is missing, and machines on other hosts join with keys only"
        found.append((f"{_SECTION}.keys_secret", wrong, "Name the Secret that docs/guides/kubernetes.md makes"))
    resources = kubernetes.resources
    for where, amounts in (("requests", resources.requests), ("limits", resources.limits)):
        for name, amount in amounts.items():
            found += _check_quantity(f"{_SECTION}.resources.{where}.{name}", amount)
    if kubernetes.shared_memory is not None:
        found += _check_quantity(f"{_SECTION}.shared_memory", kubernetes.shared_memory)
    for index, volume in enumerate(kubernetes.volumes):
        if len(volume.sources) > 1:
            wrong = f"has {' and '.join(volume.sources)}; expected one source"
            found.append((f"{_SECTION}.volumes[{index}]", wrong, "Write an item for each of them"))
    for index, toleration in enumerate(kubernetes.tolerations):
        if toleration.operator == "Exists" and toleration.value is not None:
            wrong = f"is {toleration.value}, but operator: Exists takes whatever value"
            found.append((f"{_SECTION}.tolerations[{index}].value", wrong, "Remove it, or set operator to Equal"))
        if toleration.operator == "Equal" and toleration.key is None:
            wrong = "is missing, and operator is Equal"
            found.append((f"{_SECTION}.tolerations[{index}].key", wrong, "Name the taint, or set operator to Exists"))
    for name in kubernetes.labels:
        if name.startswith(_OUR_LABELS) or name == "app.kubernetes.io/name":
            wrong = f"{name} is set by Headrace, which knows its pods by it"
            found.append((f"{_SECTION}.labels", wrong, "Remove it"))
    return found


def _check_quantity(field: str, amount: Quantity) -> list[Found]:
    if _QUANTITY.fullmatch(str(amount)):
        return []
    return [(field, f"{amount!r} is no quantity", "Write a number with a unit or without, such as 500m, 64Gi or 2")]
