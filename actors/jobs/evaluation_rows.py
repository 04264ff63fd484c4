"""Rows of eval.jsonl, and what they come to in the summary.

EvaluationDone ─▶ row_of ─▶ eval.jsonl, TensorBoard, W&B, the terminal
eval.jsonl ─▶ read_rows ─▶ the job knows which versions have their row
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any, cast

from actors.jobs.summary import read_lines

EvalRow = dict[str, float | int | dict[str, float | None] | None]

_PREFIX = "pass_at_"
_COUNTS = frozenset(["k", "prompts", "samples", "samples_dropped", "version_min", "version_max"])


def row_of(version: int, figures: dict[str, float]) -> EvalRow:
    """A line of eval.jsonl; a mean of nothing is None."""
    known = {
        name: None if not math.isfinite(value) else int(value) if name in _COUNTS else value
        for name, value in figures.items()
    }
    passes = {name.removeprefix(_PREFIX): value for name, value in known.items() if name.startswith(_PREFIX)}
    others = {name: value for name, value in known.items() if not name.startswith(_PREFIX)}
    return {"version": version, "avg_at_k": others.pop("avg_at_k", None), "pass_at_k": passes, **others}


def read_rows(path: Path) -> list[EvalRow]:
    """The rows of an earlier part of this run; a torn or damaged line is passed over."""
    return [cast("EvalRow", row) for row in read_lines(path, "version") if is_row(row)]


def is_row(row: dict[str, Any]) -> bool:
    """Whether a line of eval.jsonl has what is shown of it, in the types that it is written in."""
    passes = row.get("pass_at_k")
    return (
        isinstance(row.get("version"), int)
        and isinstance(passes, dict)
        and all(
            value is None or isinstance(value, int | float)
            for value in (row.get("avg_at_k"), *cast("dict[str, object]", passes).values())
        )
    )


def summary_of(rows: Iterable[EvalRow]) -> dict[str, Any] | None:
    """First and last evaluation by version, and the one with the best avg@k; None: there is none with a figure."""
    known = [row for row in rows if row["avg_at_k"] is not None]
    if not known:
        return None
    ordered = sorted(known, key=version_of_row)
    best = max(ordered, key=lambda row: (cast("float", row["avg_at_k"]), -version_of_row(row)))
    return {name: _short(row) for name, row in (("first", ordered[0]), ("last", ordered[-1]), ("best", best))}


def line_of(row: EvalRow) -> str:
    """A sentence about an evaluation, for people."""
    passes = cast("dict[str, float | None]", row["pass_at_k"])
    k, prompts, older = row["k"], row["prompts"], row["version_min"]
    found = [f"avg@{k} {_figure(row['avg_at_k'])}"]
    found += [f"pass@{n} {_figure(value)}" for n, value in passes.items() if n == str(k) and n != "1"]
    mixed = f", of versions {older} to {row['version_max']}" if older != row["version_max"] else ""
    return f"evaluation of version {row['version']}: {', '.join(found)} ({prompts} prompts{mixed})"


def _figure(value: object) -> str:
    return "unknown" if value is None else f"{value:.4f}"


def _short(row: EvalRow) -> dict[str, Any]:
    return {name: row[name] for name in ("version", "avg_at_k", "pass_at_k")}


def version_of_row(row: EvalRow) -> int:
    """The version that was evaluated."""
    return int(cast("int", row["version"]))
