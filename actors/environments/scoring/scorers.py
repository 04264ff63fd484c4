"""Verifiers: (response, answer) → reward. Pure functions of their arguments; they run in a scorer process.

Each may raise: the caller turns the exception into a typed failure, never into a reward of 0.
"""

from __future__ import annotations

import importlib
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from actors.environments.errors import RewardRefused, RowChanged, ScorerBroken
from actors.environments.prompts.rows import Source
from actors.environments.prompts.sources import needs_source, open_sources
from actors.environments.scoring.examples import Example
from actors.environments.scoring.user_code import as_number
from actors.host.allowed_code import why_not_allowed
from actors.host.user_code import defined_at, described
from configs.schema import JobConfig
from configs.task_schema import Reward

Scorer = Callable[[str, Example], float]


@dataclass(frozen=True)
class NamedScorer:
    """Holds one reward of a job with the function that computes it."""

    config: Reward
    where: str
    """Key of the job file, such as ``reward`` or ``reward.parts.0``."""
    name: str
    """Name among several rewards; empty for the only one."""
    weight: float
    score: Scorer

    @property
    def verifier(self) -> str:
        """The job file's key and value that name this reward, for messages."""
        if self.config.function:
            return f"{self.where}.function {self.config.function}"
        return f"{self.where}.kind {self.config.kind}"


class Scorers:
    """Holds all rewards of a job that score one by one: one, or several whose weighted sum is the reward.

    ``sources``: the job's data sets, if they are open already.
    """

    def __init__(self, job: JobConfig, sources: Mapping[str, Source] | None = None) -> None:
        if sources is None:
            sources = open_sources(job) if needs_source(job.reward) else {}
        only = next(iter(sources.values())) if len(sources) == 1 else None
        parts = job.reward.parts
        names = [(part.called, part.weight) for part in parts] or [("", 1.0)]
        self.each = [
            NamedScorer(config, where, name, weight, _with_answer(config, where, only))
            for (where, config), (name, weight) in zip(job.reward.each, names, strict=True)
            if not config.batched
        ]

    def score(self, response: str, example: Callable[[], Example]) -> tuple[float, list[float]]:
        """The reward, and its parts if several. ``example`` makes a new one for each: a verifier may change it.

        Raises:
            ScorerBroken: one of several rewards has no result, so there is no sum; says which.
            Exception: what the only reward raises.
        """
        if not self.each[0].name:
            return self.each[0].score(response, example()), []
        found = [_part(one, response, example) for one in self.each]
        total = math.fsum(one.weight * value for one, value in zip(self.each, found, strict=True))
        if not math.isfinite(total):
            raise ScorerBroken(f"reward.parts: their weighted sum is {total}; expected a finite number")
        return total, found


def _part(one: NamedScorer, response: str, example: Callable[[], Example]) -> float:
    try:
        return one.score(response, example())
    except RowChanged:
        raise
    except (Exception, SystemExit, KeyboardInterrupt) as error:
        raise ScorerBroken(f"reward {one.name}: {described(error)}") from error


def make_scorer(job: JobConfig, source: Source | None = None) -> Scorer:
    """The reward of ``job`` as one function. ``source``: the job's only data set, if it is open already."""
    scorers = Scorers(job, None if source is None else {"": source})
    return lambda response, example: scorers.score(response, lambda: example)[0]


def _with_answer(reward: Reward, where: str, source: Source | None) -> Scorer:
    """The scorer that ``reward`` names, with the answer extracted first where a pattern is set.

    Where response and reference are compared, the pattern cuts both: data such as GSM8K's hold worked solutions. A
    reference that is a number stands for its text.
    """
    score = _scorer(reward, where, source)
    pattern = re.compile(reward.answer_pattern, re.DOTALL) if reward.answer_pattern else None

    def scored(response: str, example: Example) -> float:
        answer = extract_answer(response, pattern)
        if answer is None:
            return 0.0  # a response without an answer is a verdict, not a failure
        if reward.compares:
            reference = str(example.answer)
            cut = extract_answer(reference, pattern)
            example = replace(example, answer=reference if cut is None else cut)
        value = float(score(answer, example))
        if not math.isfinite(value):
            raise ScorerBroken(f"{where}.kind {reward.kind}: the scorer returned {value}; expected a finite number")
        return value

    return scored


def extract_answer(text: str, pattern: re.Pattern[str] | None) -> str | None:
    """The last match of the pattern's group; the whole text without a pattern; None if nothing matches."""
    if pattern is None:
        return text
    found = None
    for match in pattern.finditer(text):
        found = match.group(1)
    return found


def _scorer(reward: Reward, where: str, source: Source | None) -> Scorer:
    if reward.kind == "exact_match":
        return lambda response, example: float(_normal(response) == _normal(example.answer))
    if reward.kind == "reasoning_gym":
        return lambda response, example: _of_task(example.source or source, response, example)
    if reward.kind == "math_verify":
        return _math_verify()
    return _function(reward.function or "", where)


def _of_task(source: Source | None, response: str, example: Example) -> float:
    assert source is not None, "whoever scores a task has opened it"
    return source.score(response.strip(), example.index)


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


def load_function(path: str, key: str) -> Callable[..., Any]:
    """The function or class that ``path``, which stands at ``key`` of the job file, names.

    Raises:
        RewardRefused: the import fails, is not allowed, or gives no callable; says what the module raised, and where.
    """
    if wrong := why_not_allowed(path):
        raise RewardRefused(f"{key} {wrong}")
    module_name, _, name = path.partition(":")
    try:
        function = getattr(importlib.import_module(module_name), name)
    except (Exception, SystemExit) as error:
        raise RewardRefused(
            f"{key} {path!r} cannot be imported: {described(error)}; expected 'package.module:name'"
        ) from error
    if not callable(function):
        raise RewardRefused(f"{key} {path!r} is a {type(function).__name__}, expected a function")
    return function


def _function(path: str, where: str) -> Scorer:
    """A scorer that calls the user's ``module:name(prompt, response, answer, **columns) -> float``."""
    function = load_function(path, f"{where}.function")
    whose = f"{where}.function {path} ({defined_at(function)})"

    def score(response: str, example: Example) -> float:
        return as_number(function(example.prompt, response, example.answer, **example.extra), whose)

    return score
