"""Whether rewards say what they must: a kind, what belongs to it, and names that tell several apart."""

from __future__ import annotations

import re
from collections import Counter

from configs.checks.source_lookup import find_function
from configs.schema import JobConfig
from configs.task_schema import Reward

Found = tuple[str, str, str]
"""(field, what is wrong, what to do)."""


def check_reward(job: JobConfig) -> list[Found]:
    """Problems of ``reward``, or of each of several."""
    found = [problem for where, reward in job.reward.each for problem in _check_one(job, where, reward)]
    return [*found, *_check_parts(job)]


def _check_one(job: JobConfig, where: str, reward: Reward) -> list[Found]:
    if reward.kind is None:
        fix = "Use one of: exact_match, math_verify, reasoning_gym, function"
        return [(f"{where}.kind", "is missing, and has no default", fix)]
    pattern = _check_pattern(where, reward)
    if reward.kind == "function" and not reward.function:
        fix = "Name it as package.module:name"
        return [*pattern, (f"{where}.function", f"is missing, and {where}.kind is function", fix)]
    if reward.kind != "function" and reward.function:
        wrong = f"is set, but {where}.kind is {reward.kind}"
        return [*pattern, (f"{where}.function", wrong, f"Set {where}.kind to function, or remove it")]
    others = [source for source in job.data.sources.values() if source.source != "reasoning_gym"]
    if reward.kind == "reasoning_gym" and others:
        key = "a data.source" if job.data.mix else "data.source"
        wrong = f"reasoning_gym scores its own tasks only, and {key} is {others[0].source}"
        fix = "Set data.source to reasoning_gym, or use exact_match, math_verify or function"
        return [*pattern, (f"{where}.kind", wrong, fix)]
    problem = find_function(reward.function) if reward.function else None
    return [*pattern, *([(f"{where}.function", *problem)] if problem else [])]


def _check_pattern(where: str, reward: Reward) -> list[Found]:
    if reward.answer_pattern is None:
        return []
    try:
        groups = re.compile(reward.answer_pattern).groups
        wrong = "" if groups == 1 else f"has {groups} groups, expected 1"
    except re.error as error:
        wrong = f"is no regular expression: {error}"
    fix = r"Put one pair of parentheses around the answer, such as '####\s*(\S+)'"
    return [(f"{where}.answer_pattern", f"{reward.answer_pattern!r} {wrong}", fix)] if wrong else []


def _check_parts(job: JobConfig) -> list[Found]:
    reward = job.reward
    if not reward.parts:
        return []
    found: list[Found] = []
    for key in ("kind", "function", "answer_pattern"):
        if getattr(reward, key) is not None:
            wrong = "is set, and so is reward.parts, whose items have each their own"
            found.append((f"reward.{key}", wrong, "Move it into one of them, or remove reward.parts"))
    for name, count in Counter(reward.names).items():
        if count > 1:
            wrong = f"{count} of them are called {name!r}, and each is a metric of that name"
            found.append(("reward.parts", wrong, "Give each a name of its own"))
    if not any(part.weight for part in reward.parts):
        fix = "Give at least one a weight other than 0"
        found.append(("reward.parts", "all weights are 0: every reward would be 0, and nothing be learnt", fix))
    return found
