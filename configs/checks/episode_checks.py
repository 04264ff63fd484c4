"""What does not go with episodes of several turns, or not yet; and what they need."""

from __future__ import annotations

from configs.schema import JobConfig

Found = tuple[str, str, str]
"""(field, what is wrong, what to do)."""


def check_episodes(job: JobConfig) -> list[Found]:
    """Problems of ``environment`` with the rest of the job file."""
    if not job.has_episodes:
        return []
    return [*_check_budgets(job), *_check_beside(job)]


def _check_budgets(job: JobConfig) -> list[Found]:
    environment, most = job.environment, job.rollout.max_tokens
    found: list[Found] = []
    if environment.turn_tokens is not None and environment.turn_tokens > most:
        wrong = f"{environment.turn_tokens} is more than the model's tokens of a whole episode (rollout.max_tokens)"
        found.append(("environment.turn_tokens", f"{wrong}, {most}", "Lower it, or leave it out"))
    if job.episode_tokens <= most:
        wrong = f"{job.episode_tokens} leaves the environment nothing beside rollout.max_tokens, {most}"
        found.append(("environment.episode_tokens", wrong, f"Set it to {2 * most} or more, or leave it out"))
    return found


def _check_beside(job: JobConfig) -> list[Found]:
    kind, scheduling, rollout = job.environment.kind, job.scheduling, job.rollout
    because = f"is not built for episodes (environment.kind: {kind})"
    beside = [
        ("scheduling.policy", "planned", scheduling.policy == "planned", "Set it to assign or rlboost"),
        ("scheduling.seeding", "true", scheduling.seeding, "Set it to false"),
        ("provider.kind", "functions", job.provider.kind == "functions", "Set it to none or local"),
        ("rollout.length_ranking", rollout.length_ranking, rollout.length_ranking != "none", "Set it to none"),
    ]
    return [(key, f"{value} {because}", fix) for key, value, wrong, fix in beside if wrong]
