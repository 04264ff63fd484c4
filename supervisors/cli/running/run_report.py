"""``headrace doctor --run RUN_DIR``: whether a run, finished or not, has kept what Headrace promises.

RUN_DIR ─▶ read_history ─▶ check ─▶ a table and each violation in a sentence, or JSON ─▶ exit code
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

from rich.console import Console
from rich.table import Table

from actors.core.strict_json import strict_json
from actors.core.terminal_text import harmless
from actors.ledger.errors import JournalUnreadable
from configs.run_files import JOURNAL
from supervisors.checkers.checks import PROMISES, Report, check
from supervisors.checkers.condition import Condition, look
from supervisors.checkers.history import RunState
from supervisors.checkers.run_directory import check_directory, is_open, read_history

EXIT_CLEAN: Final = 0
EXIT_VIOLATED: Final = 1
_SHOWN_MAX: Final = 10
"""Largest number of violations that are printed for one checker; ``--json`` has them all."""
_ABOUT: Final = {
    RunState.FINISHED: "finished",
    RunState.INTERRUPTED: "interrupted after a checkpoint; headrace run --resume goes on",
    RunState.FAILED: "failed",
    RunState.RUNNING: "still running: what has been recorded so far",
    RunState.CRASHED: "not running here, and it never said that it was over: crashed, or on another machine",
}


def doctor_run(run_dir: Path, *, as_json: bool) -> int:
    """Check a run directory and print what was found; returns the exit code, 0 clean or 1 violated.

    Raises:
        ConfigError: it is no run directory.
        JournalUnreadable: its journal is damaged; the message says what to do.
    """
    check_directory(run_dir)
    condition = None if is_open(run_dir / JOURNAL) else look(run_dir)  # a live run's files come and go
    problem = condition.problem() if condition is not None else ""
    try:
        report = check(read_history(run_dir))
    except JournalUnreadable as error:
        if condition is None:
            raise
        raise JournalUnreadable(f"{problem or error}; {condition.remedy()}") from error
    problem = problem or report.untrainable
    if as_json:
        told = {"clean": report.clean and not problem, "problem": problem, **_stored(condition), **report.as_map()}
        print(strict_json({"run_dir": str(run_dir), **told}), flush=True)
    else:
        console = Console(highlight=False)
        _print(console, run_dir, report)
        if condition is not None:
            _print_condition(console, condition, problem)
    return EXIT_CLEAN if report.clean and not problem else EXIT_VIOLATED


def _stored(condition: Condition | None) -> dict[str, Any]:
    if condition is None:
        return {}
    return {
        "back_to": condition.back_to,
        "checkpoints": [{"step": c.step, "path": str(c.path), "problem": c.problem} for c in condition.checkpoints],
    }


def _print_condition(console: Console, condition: Condition, problem: str) -> None:
    whole = [str(c.step) for c in condition.checkpoints if not c.problem]
    console.print(f"checkpoints that are whole: {', '.join(whole) or 'none'}", markup=False, soft_wrap=True)
    for damaged in condition.checkpoints:
        if damaged.problem and damaged.problem != problem:
            console.print(damaged.problem, style="red", markup=False, soft_wrap=True)
    if problem:
        console.print(f"it cannot go on as it is: {problem}", style="red", markup=False, soft_wrap=True)
        console.print(condition.remedy(), markup=False, soft_wrap=True)


def _print(console: Console, run_dir: Path, report: Report) -> None:
    console.print(harmless(f"{report.job} in {run_dir}: {_ABOUT[report.state]}"), markup=False, soft_wrap=True)
    counted = ", ".join(f"{count:,} {name.replace('_', ' ')}" for name, count in report.counted.items() if count)
    console.print(f"{report.steps} of {report.steps_wanted} steps committed; looked at {counted}", soft_wrap=True)
    table = Table("", "checker", "what it holds the run against", "violations")
    for name, promise in PROMISES.items():
        found = len(report.of(name))
        mark = "[red]no[/]" if found else "[green]ok[/]"
        table.add_row(mark, name, promise, str(found) if found else "")
    console.print(table)
    for name in PROMISES:
        found = report.of(name)
        for violation in found[:_SHOWN_MAX]:
            console.print(harmless(f"{name}: {violation.what}"), style="red", markup=False, soft_wrap=True)
        if len(found) > _SHOWN_MAX:
            console.print(f"{name}: … and {len(found) - _SHOWN_MAX} more; --json lists all", style="red")
    for note in report.notes:
        console.print(harmless(f"note: {note}"), style="yellow", markup=False, soft_wrap=True)
