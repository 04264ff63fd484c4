"""Baselines of benchmarks: the ratios of a quiet run, kept as JSON for each class of machine, and what got worse since.

Only ratios are compared: they hold between machines of one class, calls or bytes a second do not.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

from benchmarks._command import Result

BASELINES: Final = Path(__file__).resolve().parent / "baselines"
TOLERANCE: Final = 0.1
"""How much of a baseline's ratio may be lost to noise."""


class Ratio(NamedTuple):
    """A figure that is watched. ``path`` leads to it in the result, with dots."""

    path: str
    floor: float | None = None
    """What it must not fall below on a quiet machine, whatever the baseline says."""
    ceiling: float | None = None
    """For a ratio that is better when it is smaller: what it must not exceed. Exactly one of the two is given,
    ``inf`` if only the baseline counts."""
    tolerance: float = TOLERANCE

    def of(self, result: Result | None) -> float | None:
        """The figure; None where it was not measured."""
        found: Any = result
        for key in self.path.split("."):
            found = found.get(key) if isinstance(found, dict) else None
        return found

    def problems(self, result: Result, baseline: Result | None) -> list[str]:
        """What is wrong with it, in sentences."""
        ratio, before = self.of(result), self.of(baseline)
        if ratio is None:
            return []
        name = self.path.removesuffix(".ratio") + (": ratio" if self.path.endswith(".ratio") else ":")
        found: list[str] = []
        if self.floor is not None and ratio < self.floor:
            found.append(f"{name} {ratio} is below the floor {self.floor}")
        if self.ceiling is not None and ratio > self.ceiling:
            found.append(f"{name} {ratio} is above the ceiling {self.ceiling}")
        if before is None:
            return found
        if self.ceiling is None and ratio < before * (1.0 - self.tolerance):
            found.append(f"{name} {ratio} was {before}, more than {self.tolerance:.0%} less")
        if self.ceiling is not None and ratio > before * (1.0 + self.tolerance):
            found.append(f"{name} {ratio} was {before}, more than {self.tolerance:.0%} more")
        return found


def check(result: Result, baseline: Result | None, ratios: Sequence[Ratio]) -> list[str]:
    """What is worse than it may be, in sentences."""
    if baseline is not None and baseline["hardware"]["class"] != result["hardware"]["class"]:
        was, now = baseline["hardware"]["class"], result["hardware"]["class"]
        return [f"the baseline is of {was}, this is {now}: not comparable"]
    return [problem for ratio in ratios for problem in ratio.problems(result, baseline)]


def add_options(parser: argparse.ArgumentParser) -> None:
    """``--check`` and ``--write-baseline``."""
    parser.add_argument("--check", action="store_true", help="exit 1 if a ratio has got worse than the baseline's")
    parser.add_argument("--write-baseline", action="store_true", help="keep this result as the baseline")


def file_of(name: str, hardware_class: str, directory: Path | None = None) -> Path:
    """Where the baseline of this benchmark on this class of machine is, or will be."""
    return (directory or BASELINES) / f"{name}.{hardware_class}.json"


def settle(result: Result, name: str, ratios: Sequence[Ratio], options: argparse.Namespace) -> int:
    """What the two options ask for, with the baseline of this class of machine; the exit code."""
    file = file_of(name, result["hardware"]["class"])
    problems: list[str] = []
    if options.check:
        problems = check(result, json.loads(file.read_text()) if file.exists() else None, ratios)
        print("\n".join(problems) or "no ratio has got worse", file=sys.stderr)
    if options.write_baseline:
        file.parent.mkdir(exist_ok=True)
        file.write_text(json.dumps(result, indent=2) + "\n")
    return 1 if problems else 0
