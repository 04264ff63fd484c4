"""What the schema cannot see of the job file's ``provider`` section, and of what it needs from others."""

from __future__ import annotations

from pathlib import Path

from configs.schema import JobConfig, ProviderConfig, SpotConfig

Found = tuple[str, str, str]
"""Field, what is wrong, what to do: as in ``configs.checks.checks``."""

_TRACE_KEYS = tuple(SpotConfig.model_fields)
_FUNCTION_KEYS = ("machines", "idle_s", "bill_rounding_s", "asleep_price", "prewarm_buffer_s")


def check_provider(job: JobConfig) -> list[Found]:
    """The trace itself is read when the run begins."""
    provider, cluster, default = job.provider, job.cluster, ProviderConfig()
    foreign = {"none": (*_TRACE_KEYS, "slots", *_FUNCTION_KEYS), "local": _FUNCTION_KEYS, "functions": _TRACE_KEYS}
    others = [name for name in foreign[provider.kind] if getattr(provider, name) != getattr(default, name)]
    right = "functions" if others and others[0] in _FUNCTION_KEYS else "local"
    fix = f"Set provider.kind to {right}, or leave {'the section' if provider.kind == 'none' else 'it'} out"
    found = [(f"provider.{name}", f"is set, but provider.kind is {provider.kind}", fix) for name in others[:1]]
    if provider.kind == "none":
        return found
    if cluster.place_rollout != "elastic":
        wrong = f"{cluster.place_rollout}, but provider.kind is {provider.kind}: its machines would get no workers"
        found.append(("cluster.place_rollout", wrong, "Set it to elastic"))
    if provider.kind == "functions":
        return [*found, *_check_functions(job)]
    if provider.trace is None:
        found.append(("provider.trace", "is missing, and provider.kind is local", "Name a file; see configs/traces"))
    elif not Path(provider.trace).is_file():
        fix = "Check the path; some lie in configs/traces"
        found.append(("provider.trace", f"{provider.trace}: there is no such file", fix))
    return found


def _check_functions(job: JobConfig) -> list[Found]:
    """What planned generation asks for itself is said by its own checks."""
    provider, scheduling, mode = job.provider, job.scheduling, job.sync.mode
    found: list[Found] = []
    if provider.machines == "slurm":
        found.append(("provider.machines", "slurm is not built yet", "Set it to local"))
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
