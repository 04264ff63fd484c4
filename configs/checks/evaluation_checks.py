"""Whether an evaluation can be had: its data, how responses are drawn, and with whom it goes together."""

from __future__ import annotations

from configs.checks.data_checks import Found, check_data
from configs.schema import JobConfig


def check_evaluation(job: JobConfig) -> list[Found]:
    """Every problem of the section ``eval``, as (field, what is wrong, what to do)."""
    config, found = job.eval, list[Found]()
    if config is None:
        if job.checkpoint.keep_best:
            fix = "Add eval, which measures it, or remove keep_best"
            found.append(("checkpoint.keep_best", "true, but nothing says which checkpoint is best", fix))
        return found
    if config.samples > 1 and config.temperature == 0:
        wrong = f"0 makes all {config.samples} samples of a prompt equal"
        found.append(("eval.temperature", wrong, "Set it above 0, or eval.samples to 1"))
    if config.data.epochs is not None:
        found.append(("eval.data.epochs", "is set, but an evaluation reads its data once", "Remove it"))
    if job.has_episodes and job.evaluation.episode_tokens <= job.evaluation.rollout.max_tokens:
        wrong = f"leaves the environment nothing of environment.episode_tokens, {job.episode_tokens}"
        found.append(("eval.max_tokens", f"{config.max_tokens} {wrong}", "Lower it, or raise episode_tokens"))
    policy, seeding = job.scheduling.policy, job.scheduling.seeding
    if policy == "planned" or seeding:
        which = "policy: planned" if policy == "planned" else "seeding"
        wrong = f"is set, and so is scheduling.{which}, whose workers sleep while they would evaluate: not built yet"
        found.append(("eval", wrong, "Leave one of the two out"))
    text = check_data(job.evaluation)
    return found + [(f"eval.{field}" if field.startswith("data.") else field, wrong, fix) for field, wrong, fix in text]
