"""Control replies as tables for people. ``--json`` bypasses this file."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Final, cast

from rich.console import Console
from rich.table import Table
from rich.text import Text

from actors.core.terminal_text import harmless

COLUMNS: Final[dict[str, tuple[str, ...]]] = {
    "jobs": ("job", "state", "step", "steps", "workers", "reward_last", "error", "run_dir"),
    "runs": ("run", "state", "steps", "reward_first", "reward_last", "seconds", "model", "mode", "date"),
    "services": (
        "service",
        "state",
        "serves",
        "holder",
        "residency",
        "queue",
        "steps",
        "compute_s_a_step",
        "device_s_a_step",
        "alone_s_a_step",
        "bubble",
        "saving",
        "slowdown",
        "error",
    ),
    "queue": ("job", "service", "project", "priority", "state_bytes", "why"),
    "models": ("tenant", "model", "base_model", "rank", "operations", "waiting", "awake", "why"),
    "tree": ("name", "role", "node", "pid", "state", "incarnation", "restarts", "devices"),
    "nodes": ("node", "kind", "state", "slots", "slots_used", "devices", "free", "given"),
    "stalls": ("since_s", "process", "waiter", "waits_for", "kind", "what"),
    "dead_letters": ("ago_s", "process", "reason", "tag", "source", "target"),
    "metrics": (
        "step",
        "policy_version",
        "reward_mean",
        "seconds",
        "tokens_generated",
        "staleness_max",
        "restarts",
    ),
}
"""The columns that a verb's table shows, in order; other keys are for programs."""

_PIPE_COLUMNS: Final = 200
_ABSENT: Final[dict[str, object]] = {"pid": 0, "error": "", "devices": [], "free": [], "given": {}}
"""Values shown as ``-`` in a column: an actor of the head has no process of its own, and many have no device."""


def console() -> Console:
    """A console on stdout; on a file or a pipe it is wide enough for any row."""
    shown = Console(highlight=False)
    return shown if shown.is_terminal else Console(highlight=False, width=_PIPE_COLUMNS)


def print_result(console: Console, op: str, result: Any) -> None:
    """Print the result of ``op``: rows as a table, lines as lines, a map as one line of ``key value``."""
    if op == "dead_letters":
        _print_dead_letters(console, result)
    elif isinstance(result, list):
        items = cast("list[Any]", result)
        if items and all(isinstance(item, dict) for item in items):
            console.print(table(items, COLUMNS.get(op)))
        elif items:
            for item in items:
                console.print(harmless(str(item)), markup=False, highlight=False, soft_wrap=True)
        else:
            console.print("no job waits" if op == "queue" else f"no {op}", style="dim")
    elif isinstance(result, dict):
        console.print(
            line(cast("dict[str, Any]", result)) or "done",
            markup=False,
            highlight=False,
            soft_wrap=True,
        )
    else:
        console.print(harmless(str(result)), markup=False)


def _print_dead_letters(console: Console, result: dict[str, list[dict[str, Any]]]) -> None:
    if not result["counts"]:
        console.print("no dead letters", style="dim")
        return
    console.print(table(result["counts"], None))
    console.print()
    console.print(table(result["newest"], COLUMNS["dead_letters"]))


def table(rows: list[dict[str, Any]], columns: Iterable[str] | None) -> Table:
    """Rows as a table; without ``columns`` all keys, in order of appearance."""
    names = list(columns or dict.fromkeys(key for row in rows for key in row))
    view = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")  # leaves the columns two thirds more room
    for name in names:
        numbers = all(isinstance(row.get(name), int | float) for row in rows)
        view.add_column(Text(harmless(name.replace("_", " "))), justify="right" if numbers else "left", overflow="fold")
    for row in rows:  # as Text, in which brackets are no markup
        view.add_row(*(Text(_cell(row.get(name)) if row.get(name) != _ABSENT.get(name) else "-") for name in names))
    return view


def line(values: Mapping[str, Any]) -> str:
    """A map as ``key value  key value``."""
    return "  ".join(f"{harmless(str(key))} {_cell(value)}" for key, value in values.items())


def _cell(value: object) -> str:
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, list):
        return ", ".join(_cell(item) for item in cast("list[object]", value)) or "-"
    if isinstance(value, dict):
        items = cast("dict[object, object]", value).items()
        return "; ".join(f"{harmless(str(key))}: {_cell(held)}" for key, held in items)
    text = harmless(str(value))
    return text.removeprefix(f"{Path.cwd()}/") if text.startswith("/") else text
