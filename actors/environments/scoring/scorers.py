"""Verifiers: (response, answer) → reward. Pure functions of their arguments; they run in a scorer process.

Each may raise: the caller turns that into a typed failure, never into a reward of 0.
"""

from __future__ import annotations

import importlib
import math
import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from actors.environments.errors import RewardRefused, ScorerBroken
from actors.environments.prompts.rows import Source
from actors.environments.prompts.sources import compares, needs_source, open_source
from actors.environments.scoring.examples import Example
from actors.environments.scoring.user_code import as_number, defined_at, described
from configs.schema import JobConfig

Scorer = Callable[[str, Example], float]


def make_scorer(job: JobConfig, source: Source | None = None) -> Scorer:
    """The scorer that ``job.reward`` names, with the answer extracted first where a pattern is set.

    ``source``: the job's data set, if it is open already. Where response and reference are compared, the pattern cuts
    both: data such as GSM8K's hold worked solutions. A reference that is a number stands for its text.
    """
    if source is None and needs_source(job.reward):
        source = open_source(job.data, job.seed)
    score = _scorer(job, source)
    pattern = re.compile(job.reward.answer_pattern, re.DOTALL) if job.reward.answer_pattern else None
    comparing = compares(job.reward)

    def scored(response: str, example: Example) -> float:
        answer = extract_answer(response, pattern)
        if answer is None:
            return 0.0  # the response holds no answer at all: that is a verdict, not a failure
        if comparing:
            reference = str(example.answer)
            cut = extract_answer(reference, pattern)
            example = replace(example, answer=reference if cut is None else cut)
        reward = float(score(answer, example))
        if not math.isfinite(reward):
            raise ScorerBroken(f"reward.kind {job.reward.kind}: the scorer returned {reward}; expected a finite number")
        return reward

    return scored


def extract_answer(text: str, pattern: re.Pattern[str] | None) -> str | None:
    """The last match of the pattern's group; the whole text without a pattern; None if nothing matches."""
    if pattern is None:
        return text
    found = None
    for match in pattern.finditer(text):
        found = match.group(1)
    return found


def _scorer(job: JobConfig, source: Source | None) -> Scorer:
    reward = job.reward
    if reward.kind == "exact_match":
        return lambda response, example: float(_normal(response) == _normal(example.answer))
    if reward.kind == "reasoning_gym" and source is not None:
        return lambda response, example: source.score(response.strip(), example.index)
    if reward.kind == "math_verify":
        return _math_verify()
    return _function(reward.function or "")


def _normal(text: str) -> str:
    return " ".join(text.split())


def _math_verify() -> Scorer:
    from math_verify import parse, verify

    def score(response: str, example: Example) -> float:
        # the scorer process has a deadline of its own; the library's uses signals and would only get in its way
        gold = parse(example.answer, parsing_timeout=None)  # pyright: ignore[reportArgumentType]  (None: no alarm)
        if not gold:
            raise ScorerBroken(f"the reference answer {example.answer!r} cannot be parsed as mathematics")
        found = parse(response, parsing_timeout=None)  # pyright: ignore[reportArgumentType]  (as above)
        return float(verify(gold, found, timeout_seconds=None))

    return score


def load_function(path: str) -> Callable[..., Any]:
    """The function that ``reward.function`` names.

    Raises:
        RewardRefused: it cannot be imported; says what its module raised, and where.
    """
    module_name, _, name = path.partition(":")
    try:
        function = getattr(importlib.import_module(module_name), name)
    except (Exception, SystemExit) as error:
        raise RewardRefused(
            f"reward.function {path!r} cannot be imported: {described(error)}; expected 'package.module:name'"
        ) from error
    if not callable(function):
        raise RewardRefused(f"reward.function {path!r} is a {type(function).__name__}, expected a function")
    return function


def _function(path: str) -> Scorer:
    """A user's function ``module:name(prompt, response, answer, **columns) -> float``."""
    function = load_function(path)
    whose = f"reward.function {path} ({defined_at(function)})"

    def score(response: str, example: Example) -> float:
        return as_number(function(example.prompt, response, example.answer, **example.extra), whose)

    return score
