"""A paper's claims against a run: each row has what was published and what came out of ours.

    PaperScenario ─▶ study function ─▶ measures ─┐        (of a sweep: its points, which can be drawn)
          └─ claims ─────────────────────────────┴▶ PaperResult ─▶ table for people, one object for scripts

A claim that ours does not reproduce is a row with ``within`` false, never an error; a claim about a measure that the
study does not have is an error of the scenario file.
"""

from __future__ import annotations

import json
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.papers.result_data import RESULT
from benchmarks.papers.scenario import Claim, PaperScenario
from benchmarks.papers.studies.registry import STUDIES, Measures
from benchmarks.papers.sweep import Sweep
from configs.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Row:
    """A row holds one claim and our number for it."""

    claim: Claim
    ours: float

    @property
    def within(self) -> bool:
        return self.claim.within(self.ours)

    def as_map(self) -> dict[str, Any]:
        """The row of ``simulate --json``."""
        claim = self.claim
        row: dict[str, Any] = {"claim": claim.claim, "source": claim.source, "published": claim.published}
        row |= {"ours": round(self.ours, 4), "tolerance": claim.tolerance, "within": self.within}
        return row | {"tolerance_is": claim.tolerance_is, "holds": claim.holds}


@dataclass(frozen=True, slots=True)
class PaperResult:
    """A result holds what one scenario gave."""

    scenario: str
    rows: list[Row]
    measures: Measures
    """Numbers that came out, claimed or not."""
    seconds: float
    sweep: Sweep | None = None
    """Curves of a study that varies a parameter."""

    def as_map(self) -> dict[str, Any]:
        """The object with which ``simulate FILE --json`` ends."""
        rows = [row.as_map() for row in self.rows]
        return {"scenario": self.scenario, "claims": rows, "seconds": round(self.seconds, 3)}

    def write(self, folder: Path) -> Path:
        """``result.json`` in ``folder``, for ``headrace plot``; returns its path.

        Raises:
            OSError: it cannot be written.
        """
        folder.mkdir(parents=True, exist_ok=True)
        path, sweep = folder / RESULT, self.sweep.as_map() if self.sweep else None
        whole = self.as_map() | {"measures": dict(self.measures), "sweep": sweep}
        path.write_text(json.dumps(whole, indent=1) + "\n", encoding="utf-8")
        return path


def run_paper(scenario: PaperScenario, seed: int | None = None) -> PaperResult:
    """Run the study and put the claims beside what came out.

    Raises:
        ConfigError: a claim names a measure that the study does not have.
    """
    began_s = time.perf_counter()
    outcome = STUDIES[scenario.study.kind](scenario.study, scenario.seed if seed is None else seed)
    sweep = outcome if isinstance(outcome, Sweep) else None
    measures = outcome.measures() if isinstance(outcome, Sweep) else outcome
    rows = [Row(claim, measures[_known(claim, measures, scenario)]) for claim in scenario.claims]
    return PaperResult(scenario.name, rows, measures, time.perf_counter() - began_s, sweep)


def _known(claim: Claim, measures: Measures, scenario: PaperScenario) -> str:
    if claim.measure not in measures:
        wrong = f"a study of kind {scenario.study.kind} has no measure {claim.measure!r}"
        fix = f"Name one of: {', '.join(sorted(measures))}"
        raise ConfigError.of(scenario.name, "claims", wrong, fix)
    return claim.measure


# ------------------------------------------------------------ for people


def table(result: PaperResult) -> str:
    """The rows as columns, those that are not within marked."""
    head = ("claim", "source", "published", "ours", "tolerance", "within")
    body = [_cells(row) for row in result.rows]
    widths = [max(len(cells[i]) for cells in (head, *body)) for i in range(len(head))]
    lines = [_line(head, widths), _line(["─" * width for width in widths], widths)]
    lines += [_line(cells, widths) for cells in body]
    agreed = sum(row.within for row in result.rows)
    lines.append(f"{result.scenario}: {agreed} of {len(result.rows)} claims within tolerance, {result.seconds:.1f} s")
    return "\n".join(lines)


def _line(cells: tuple[str, ...] | list[str], widths: list[int]) -> str:
    """Text to the left, numbers to the right."""
    aligned = [
        cell.rjust(width) if 2 <= i <= 4 else cell.ljust(width)
        for i, (cell, width) in enumerate(zip(cells, widths, strict=True))
    ]
    return "  ".join(aligned).rstrip()


def _cells(row: Row) -> tuple[str, ...]:
    claim, (low, high) = row.claim, row.claim.band
    published = _number(low) if low == high else f"{_number(low)}–{_number(high)}"
    published = {"near": "", "at_least": "≥ ", "at_most": "≤ "}[claim.holds] + published
    allowed = f"{claim.tolerance * 100:g} %" if claim.tolerance_is == "relative" else f"{claim.tolerance:g}"
    return claim.claim, claim.source, published, _number(row.ours), f"± {allowed}", "yes" if row.within else "NO"


def _number(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"
