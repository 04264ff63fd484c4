"""Checks of the job file's ``scheduling`` section beyond the schema."""

from __future__ import annotations

from configs.errors import Found
from configs.schema import JobConfig, PlanConfig, SchedulingConfig


def check_scheduling(job: JobConfig) -> list[Found]:
    """Problems of the section and of what it needs from other sections."""
    return [*_check_relief(job), *_check_pool_bounds(job), *_check_seeding(job), *_check_planned(job)]


def _check_relief(job: JobConfig) -> list[Found]:
    if not job.scheduling.relief or job.scheduling.policy == "rlboost":
        return []
    wrong = f"is set, but scheduling.policy is {job.scheduling.policy}, with which samples stay where they are"
    return [("scheduling.relief", wrong, "Set scheduling.policy to rlboost, or remove it")]


def _check_pool_bounds(job: JobConfig) -> list[Found]:
    scheduling, begin = job.scheduling, job.rollout.workers
    if scheduling.workers_max is None:
        if scheduling.workers_min > 1:
            fix = "Set scheduling.workers_max too, or remove it"
            return [("scheduling.workers_min", "is set, but without scheduling.workers_max nobody heeds it", fix)]
        return []
    least = max(scheduling.workers_min, begin if job.cluster.place_rollout == "elastic" else 0)
    if scheduling.workers_max < least:
        what = "scheduling.workers_min" if least == scheduling.workers_min else "rollout.workers"
        fix = f"Set it to at least {least}"
        return [("scheduling.workers_max", f"{scheduling.workers_max} is less than {what} ({least})", fix)]
    if job.cluster.place_rollout != "elastic" and not scheduling.workers_min <= begin <= scheduling.workers_max:
        wrong = f"{begin} is not between scheduling.workers_min ({scheduling.workers_min}) and workers_max"
        return [("rollout.workers", f"{wrong} ({scheduling.workers_max})", "Begin with a number between the two")]
    return []


def _check_seeding(job: JobConfig) -> list[Found]:
    scheduling, place = job.scheduling, job.cluster.place_rollout
    if not scheduling.seeding:
        default, names = SchedulingConfig(), [name for name in SchedulingConfig.model_fields if "seeding_" in name]
        given = [name for name in names if getattr(scheduling, name) != getattr(default, name)]
        fix = "Set scheduling.seeding to true, or remove it"
        return [(f"scheduling.{given[0]}", "is set, but scheduling.seeding is false", fix)] if given else []
    found: list[Found] = []
    if place not in ("elastic", "local"):
        wrong = f"{place}, but scheduling.seeding needs workers beside the trainer"
        fix = "Set it to elastic, or to local if all workers are to be on the head's machine"
        found.append(("cluster.place_rollout", wrong, fix))
    if job.sync.mode == "one_step_barrier":
        wrong = "one_step_barrier, whose barrier waits for each engine's version; those that sleep load none"
        fix = "Set it to async or an on-policy mode, or scheduling.seeding to false"
        found.append(("sync.mode", wrong, fix))
    if not job.rollout.workers:
        wrong = "0, but scheduling.seeding needs workers on the head's machine"
        found.append(("rollout.workers", wrong, "Set it to 1 or more, or scheduling.seeding to false"))
    if scheduling.seeding_end == "estimated" and job.rollout.length_ranking == "none":
        wrong = "estimated, but rollout.length_ranking is none, so no length is expected"
        found.append(("scheduling.seeding_end", wrong, "Set rollout.length_ranking, or this to learned"))
    if scheduling.workers_max is not None and scheduling.policy != "planned":  # a plan refuses seeding anyway
        wrong = "is set, but with scheduling.seeding its capacity target says how many workers there are"
        found.append(("scheduling.workers_max", wrong, "Remove it, or set scheduling.seeding to false"))
    return found


def _check_planned(job: JobConfig) -> list[Found]:
    scheduling, mode = job.scheduling, job.sync.mode
    if scheduling.policy != "planned":
        default, plan = PlanConfig(), scheduling.plan
        given = [name for name in PlanConfig.model_fields if getattr(plan, name) != getattr(default, name)]
        fix = "Set scheduling.policy to planned, or remove it"
        wrong = f"is set, but scheduling.policy is {scheduling.policy}"
        return [(f"scheduling.plan.{given[0]}", wrong, fix)] if given else []
    found: list[Found] = []
    if scheduling.workers_max is None:
        wrong = "is missing, but scheduling.policy is planned, and a plan needs the largest number of workers to try"
        found.append(("scheduling.workers_max", wrong, "Set it to the number of workers that you would pay for"))
    if mode not in ("sync", "minibatch"):
        wrong = f"{mode}, but scheduling.policy is planned, and only a step of one version can be planned"
        found.append(("sync.mode", wrong, "Set it to sync or minibatch, or scheduling.policy to assign"))
    if scheduling.seeding:
        wrong = "is set, but with scheduling.policy: planned the plan says who generates and who sleeps"
        found.append(("scheduling.seeding", wrong, "Remove it, or set scheduling.policy to assign or rlboost"))
    if job.rollout.length_ranking == "none":
        wrong = "none, but scheduling.policy is planned, and a plan needs expected lengths"
        found.append(("rollout.length_ranking", wrong, "Set it to history"))
    return found
