"""Tries the verifier on real data before anything is generated: one that can only fail is refused at once.

    first rows ─▶ does the call fit the function? ─no─▶ RewardRefused
                  │ yes
                  ▼
    first row, its own answer as the response ─▶ a number ─▶ nothing is said
                  │ raises
                  ├─ whatever the response: a name or attribute that is missing, an import, no number ─▶ RewardRefused
                  └─ else it may be the response's fault, for which no run is refused ────────────────▶ a warning
    first rows, the prompt itself as the response ─▶ most are counted right ──────────────────────────▶ a warning

The last check is for built-in verifiers only: a user's function is called once, since it may be slow or have effects.

The trial is also a warm-up: a function that imports on its first call does so here, where there is time for it.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from time import monotonic
from types import ModuleType
from typing import Any, Final

from actors.environments.errors import NoNumber, RewardRefused, SourceUnreadable
from actors.environments.prompts.rows import Source
from actors.environments.prompts.sources import epoch_order
from actors.environments.scoring.examples import Example
from actors.environments.scoring.scorers import NamedScorer, Scorers, load_function
from actors.host.user_code import defined_at, described
from configs.schema import DataConfig, JobConfig

CALLED: Final = "called with the first row of the data and its own answer as the response"
_ROWS: Final = 32
"""Number of first rows whose columns must fit the function."""
_REPEATED: Final = 8
"""Number of first rows whose prompt is scored as if it were the response."""


def try_once(job: JobConfig, scorers: Scorers, sources: Mapping[str, Source]) -> list[str]:
    """Call every reward on the first row of every source; returns warnings for people.

    Raises:
        RewardRefused: no call could succeed; says why, with file and line.
        SourceUnreadable: the first row cannot be read.
    """
    warnings: list[str] = []
    for name, source in sources.items():
        for one in scorers.each:
            examples = first_examples(job.all_sources[name], job.seed, source)  # anew: a verifier may change them
            if not examples:
                break  # no row at all: reading prompts says so
            warning = _check_calls(one, examples) if one.config.function else ""
            warning = _call(job, one, examples[0]) or warning or _check_repeated_prompts(one, examples[:_REPEATED])
            if warning:
                warnings.append(f"with the data of {name}: {warning}" if name else warning)
    return warnings


def first_examples(data: DataConfig, seed: int, source: Source) -> list[Example]:
    """The first rows of the stream, up to one that cannot be read; raises SourceUnreadable if that is the first."""
    examples: list[Example] = []
    for index in epoch_order(data, seed, len(source), 0)[:_ROWS]:
        try:
            row = source.row(int(index))
        except SourceUnreadable:
            if examples:
                break  # reported when that row is needed
            raise
        examples.append(Example(row.prompt, row.answer, row.index, row.extra, source))
    return examples


def _check_calls(one: NamedScorer, examples: list[Example]) -> str:
    """Check the call with each row's columns; returns a warning, or raises RewardRefused if no row fits."""
    function = load_function(one.config.function or "", f"{one.where}.function")
    if inspect.iscoroutinefunction(function):
        raise RewardRefused(
            f"{one.verifier} ({defined_at(function)}) is a coroutine function; write def, not async def"
        )
    problems = [_misfit(function, example) for example in examples]
    found = [problem for problem in problems if problem]
    if not found:
        return ""
    example = examples[next(i for i, problem in enumerate(problems) if problem)]
    columns = "".join(f", {column}=…" for column in example.extra)
    text = (
        f"{one.verifier} ({defined_at(function)}) cannot be called as "
        f"(prompt, response, answer{columns}), as row {example.index} of the data asks: {found[0]}. Its first three "
        "parameters are prompt, response and answer; further columns come by name"
    )
    if len(found) == len(examples):
        raise RewardRefused(text)
    return f"{text}. So do {len(found)} of the first {len(examples)} rows, whose samples will have no verdict"


def _misfit(function: Callable[..., Any], example: Example) -> str:
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):
        return ""  # a compiled function may have no signature
    try:
        signature.bind(example.prompt, "", example.answer, **example.extra)
    except TypeError as error:
        return str(error)
    return ""


def _call(job: JobConfig, one: NamedScorer, example: Example) -> str:
    verifier = one.verifier
    began_s = monotonic()
    try:
        one.score(example.answer if isinstance(example.answer, str) else "", example)
    except (Exception, SystemExit, KeyboardInterrupt) as error:
        if isinstance(error, NoNumber):
            raise RewardRefused(f"{error}, {CALLED}") from error
        if _is_hopeless(error):
            raise RewardRefused(f"{verifier} can only fail: {described(error)}, {CALLED}") from error
        return f"{verifier} gave no verdict: {described(error)}, {CALLED}. Mend it, unless that response is to blame"
    took_s = monotonic() - began_s
    if took_s > job.reward.timeout_s:
        return (
            f"{verifier} took {took_s:.1f} s, {CALLED}: longer than reward.timeout_s ({job.reward.timeout_s:g} s). "
            "If later calls take as long, their samples will have no verdict: raise it"
        )
    return ""


def _check_repeated_prompts(one: NamedScorer, examples: list[Example]) -> str:
    """A warning if a model that only repeats its prompt would be rewarded: it would soon learn nothing else.

    ``math_verify`` finds "To find 37 + 2, we need …" equal to the answer 39, unless a pattern says where an answer
    stands. A question mark would hide the sum from ``math_verify``; models repeat the question without one.
    """
    if one.config.kind == "function":
        return ""
    prompts = [(example.prompt, example) for example in examples if isinstance(example.prompt, str)]
    right = sum(
        any(_is_right(one, response, example) for response in (prompt, prompt.replace("?", ",")))
        for prompt, example in prompts
    )
    if 2 * right <= len(prompts):
        return ""
    return (
        f"{one.verifier} gives full marks to a response that only repeats the prompt, in {right} of the "
        f"first {len(prompts)} rows: the reward may rise while the model gets no better. Set "
        f"{one.where}.answer_pattern, so that the answer alone is scored, and look at headrace samples RUN_DIR"
    )


def _is_right(one: NamedScorer, response: str, example: Example) -> bool:
    try:
        return one.score(response, example) >= 1.0
    except Exception:  # noqa: BLE001 (without a verdict there are no full marks)
        return False


def _is_hopeless(error: BaseException) -> bool:
    """Whether no other response could have avoided the error."""
    if isinstance(error, UnboundLocalError):
        return False  # a variable that only some responses set
    if isinstance(error, AttributeError):
        return isinstance(error.obj, ModuleType | str)  # of others: None.group(1), where nothing matched
    return isinstance(error, NameError | ImportError | SyntaxError)
