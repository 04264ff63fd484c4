"""The one error of this package: the writer of the job file is at fault, and a retry without an edit fails again.

It stands outside the tree of ``transport/errors.py`` because ``configs`` imports nothing of ours. ``main.py`` prints it
and exits with code 2.
"""

from __future__ import annotations

from dataclasses import dataclass

Found = tuple[str, str, str]
"""What a check finds wrong with a value of the right type: (dotted field, what is wrong, what to do)."""


@dataclass(frozen=True)
class Problem:
    """Names one thing that is wrong, and what to do about it."""

    where: str
    """Place where it was written: ``job.yaml:12`` or ``--set a.b=c``."""
    field: str
    """Dotted path, such as ``rollout.workers``; empty for the file as a whole."""
    wrong: str
    """What was found and what was expected."""
    fix: str
    """What to do, as an imperative sentence."""

    def __str__(self) -> str:
        subject = f"{self.where}: {self.field}: " if self.field else f"{self.where}: "
        return f"{subject}{self.wrong}. {self.fix}"


class ConfigError(ValueError):
    """A job file that cannot be run. ``str(error)`` is one message that names every field, value and fix."""

    SHOWN_MAX = 10

    def __init__(self, problems: list[Problem]) -> None:
        self.problems = problems
        lines = [str(problem) for problem in problems[: self.SHOWN_MAX]]
        if len(problems) > self.SHOWN_MAX:
            lines.append(f"… and {len(problems) - self.SHOWN_MAX} more")
        super().__init__("\n".join(lines))

    @classmethod
    def of(cls, where: str, field: str, wrong: str, fix: str) -> ConfigError:
        """An error with one problem."""
        return cls([Problem(where, field, wrong, fix)])
