"""Checks of ``algorithm`` beyond the schema: keys that its rule does not read, and keys that contradict each other."""

from __future__ import annotations

from typing import Any, Final

from configs.checks.source_lookup import find_function
from configs.errors import Found
from configs.schema import JobConfig

_STREAMING: Final = ("minibatch", "dynamic")


def check_learning(job: JobConfig) -> list[Found]:
    """Problems of ``algorithm``, and of keys elsewhere that contradict it."""
    checks = (_check_keys, _check_filter, _check_whole_step, _check_kl, _check_correction, _check_functions)
    return [problem for check in checks for problem in check(job)]


def _check_keys(job: JobConfig) -> list[Found]:
    algorithm, found = job.algorithm, list[Found]()
    if is_set(algorithm, "gae_lambda") and not algorithm.has_critic:
        wrong = f"is set, but algorithm.name is {algorithm.name}, which has no critic"
        found.append(("algorithm.gae_lambda", wrong, "Set algorithm.name to ppo, or remove it"))
    if is_set(algorithm, "gamma") and algorithm.name not in ("ppo", "reinforce_pp"):
        wrong = f"is set, but algorithm.name is {algorithm.name}, which gives each response one reward"
        found.append(("algorithm.gamma", wrong, "Set algorithm.name to ppo or reinforce_pp, or remove it"))
    if algorithm.group_size < algorithm.siblings_min:
        wrong = f"1, but {algorithm.name} compares the samples of a prompt with each other"
        found.append(("algorithm.group_size", wrong, "Set it to 2 or more, or algorithm.name to ppo or reinforce_pp"))
    if job.rollout.length_ranking == "siblings" and algorithm.group_size == 1 and not algorithm.compares_siblings:
        wrong = "siblings, but algorithm.group_size is 1, so no sample has any"
        found.append(("rollout.length_ranking", wrong, "Set it to history or learned"))
    if algorithm.minibatches > algorithm.prompts_per_step:
        wrong = f"{algorithm.minibatches}, but a step has {algorithm.prompts_per_step} prompts to share among them"
        found.append(("algorithm.minibatches", wrong, "Lower it, or raise algorithm.prompts_per_step"))
    if algorithm.overlong is not None and algorithm.overlong.buffer_tokens >= job.rollout.max_tokens:
        wrong = f"{algorithm.overlong.buffer_tokens} is not below rollout.max_tokens {job.rollout.max_tokens}"
        found.append(("algorithm.overlong.buffer_tokens", wrong, "Lower it; a fifth of max_tokens is usual"))
    return found


def _check_filter(job: JobConfig) -> list[Found]:
    algorithm = job.algorithm
    if algorithm.filter == "none":
        wrong = "is set, but algorithm.filter is none, so a step reads its prompts once"
        unused = [("algorithm.filter_batches", wrong, "Set algorithm.filter to spread, or remove it")]
        return unused if is_set(algorithm, "filter_batches") else []
    found: list[Found] = []
    if job.sync.mode != "sync":
        wrong = f"{job.sync.mode} begins a step before it is known which prompts the one before it has used"
        found.append(
            ("sync.mode", f"{wrong} (algorithm.filter: spread)", "Set it to sync, or algorithm.filter to none")
        )
    if not algorithm.compares_siblings:
        wrong = f"spread, but {algorithm.name} learns from equal rewards, too"
        found.append(("algorithm.filter", wrong, "Set it to none, or choose another algorithm.name"))
    others = {
        "scheduling.policy": job.scheduling.policy == "planned",
        "scheduling.seeding": job.scheduling.seeding,
        "rollout.length_ranking": job.rollout.length_ranking != "none",
    }
    for key in (key for key, used in others.items() if used):
        wrong = "plans a step by its first prompts, and algorithm.filter: spread adds to them"
        found.append((key, wrong, "Remove it, or set algorithm.filter to none"))
    return found


def is_set(section: Any, key: str) -> bool:
    """Whether a key has another value than its default."""
    return getattr(section, key) != type(section).model_fields[key].default


def _check_whole_step(job: JobConfig) -> list[Found]:
    """Keys that contradict a rule that needs the whole step, or a step of several updates."""
    algorithm, found = job.algorithm, list[Found]()
    if not algorithm.needs_whole_step:
        return found
    why = f"{algorithm.name} whitens advantages over all" if algorithm.whitens else "several updates cut all into parts"
    if job.sync.mode in _STREAMING:
        wrong = f"{job.sync.mode} trains a part of a step before the rest is there, and {why}"
        found.append(("sync.mode", wrong, "Set it to sync, one_step_barrier or async"))
    if job.trainer.window_prompts:
        found.append(("trainer.window_prompts", f"is set, but the window is the whole step: {why}", "Remove it"))
    if job.trainer.service is not None:
        for key, number in (("epochs", algorithm.epochs), ("minibatches", algorithm.minibatches)):
            if number > 1:
                wrong = f"{number} with trainer.service is not built: a burst of a service holds one update"
                found.append((f"algorithm.{key}", wrong, "Set it to 1, or remove trainer.service"))
    return found


def _check_kl(job: JobConfig) -> list[Found]:
    algorithm = job.algorithm
    if algorithm.kl_in_rewards:
        keys = [key for key, usual in (("kl_kind", "k1"), ("kl_unbiased", False)) if getattr(algorithm, key) != usual]
        wrong = f"is set, but {algorithm.name} has the KL in its rewards, as k1"
        return [(f"algorithm.{key}", wrong, "Remove it, or choose another algorithm.name") for key in keys]
    if algorithm.kl_unbiased and algorithm.kl_coefficient == 0:
        wrong = "is set, but algorithm.kl_coefficient is 0, so there is no KL"
        return [("algorithm.kl_unbiased", wrong, "Set algorithm.kl_coefficient above 0, or remove it")]
    if algorithm.kl_kind == "k1" and not algorithm.kl_unbiased:
        wrong = "k1 in the loss has a gradient that is 0 on average"
        return [("algorithm.kl_kind", wrong, "Set algorithm.kl_unbiased to true, or kl_kind to k2 or k3")]
    return []


def _check_correction(job: JobConfig) -> list[Found]:
    algorithm, found = job.algorithm, list[Found]()
    if algorithm.surrogate == "weighted" and algorithm.correction == "tis":
        wrong = f"tis, but {algorithm.name} bounds the same ratio by clip_high"
        found.append(("algorithm.correction", wrong, "Set it to none, icepop or sequence_mask, or remove it"))
    if is_set(algorithm, "importance_cap") and algorithm.correction == "none":
        wrong = "is set, but algorithm.correction is none"
        found.append(("algorithm.importance_cap", wrong, "Set algorithm.correction, or remove it"))
    if is_set(algorithm, "importance_floor") and algorithm.correction != "icepop":
        wrong = f"is set, but algorithm.correction is {algorithm.correction}, which has no lower bound"
        found.append(("algorithm.importance_floor", wrong, "Set algorithm.correction to icepop, or remove it"))
    if algorithm.correction == "icepop" and algorithm.importance_floor >= algorithm.importance_cap:
        wrong = f"{algorithm.importance_floor:g} is not below algorithm.importance_cap {algorithm.importance_cap:g}"
        found.append(("algorithm.importance_floor", wrong, "Lower it; 0.5 is usual, with a cap of 5"))
    return found


def _check_functions(job: JobConfig) -> list[Found]:
    algorithm, found = job.algorithm, list[Found]()
    for key in ("advantage", "loss"):
        name = getattr(algorithm, key)
        if name is not None and (problem := find_function(name)):
            found.append((f"algorithm.{key}", *problem))
    if algorithm.loss is not None and job.trainer.service is not None:
        wrong = "is set with trainer.service, which computes for others, too, and runs no code of one job"
        found.append(("algorithm.loss", wrong, "Remove one of the two"))
    return found
