"""How a version of the weights is evaluated on held-out prompts.

    scheduler ──NeedEvaluation──▶ job ──IssueBatch──▶ scheduler        samples are drawn and scored like any others
                                   └──GiveUpEvaluation──▶ scheduler    its prompts cannot be read
    scheduler ──EvaluationDone──▶ job ──EvaluationRow──▶ metrics

The samples of an evaluation are a batch of their own: its ``step`` is a negative number that stands for the version, so
that no counter of steps ever meets it.
"""

from __future__ import annotations

from actors.core.message import Message, message


def evaluation_step(version: int) -> int:
    """The ``step`` of the batch that evaluates ``version``."""
    return -1 - version


def version_of(step: int) -> int:
    """The version that a batch of this negative ``step`` evaluates."""
    return -1 - step


def is_evaluation(step: int) -> bool:
    """Whether the batch of ``step`` evaluates a version, and no step trains on it."""
    return step < 0


def name_of_batch(step: int) -> str:
    """Name of the batch in sentences."""
    return f"the evaluation of version {version_of(step)}" if is_evaluation(step) else f"step {step}"


def short_name(step: int) -> str:
    """Name of the batch in keys and paths: ``12`` of a step, ``e3`` of the evaluation of version 3."""
    return f"e{version_of(step)}" if is_evaluation(step) else str(step)


def step_of_short_name(name: str) -> int | None:
    """The step whose ``short_name`` is ``name``; None: it is no such name."""
    number = name.removeprefix("e")
    if not (number.isascii() and number.isdecimal()):
        return None
    return int(number) if number == name else evaluation_step(int(number))


@message("jobs.need_evaluation")
class NeedEvaluation(Message):
    """The scheduler wants the prompts of the evaluation of this version."""

    job: str
    version: int


@message("scheduler.give_up_evaluation")
class GiveUpEvaluation(Message):
    """The prompts cannot be read, now or later. Reply: Acknowledged."""

    job: str
    version: int
    why: str


@message("jobs.evaluation_done")
class EvaluationDone(Message):
    """An evaluation is over, and its result durable."""

    job: str
    version: int
    figures: dict[str, float]
    """Figures by name, as ``actors/scheduler/evaluations.py`` computes them; a mean of nothing is NaN."""


@message("metrics.evaluation_row")
class EvaluationRow(Message):
    """The job adds a line to eval.jsonl."""

    job: str
    row: dict[str, float | int | dict[str, float | None] | None]
