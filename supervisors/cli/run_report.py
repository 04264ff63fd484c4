"""``headrace doctor --run RUN_DIR``: whether a run, finished or not, has kept what Headrace promises.

RUN_DIR ─▶ read_history ─▶ check ─▶ a table and each violation in a sentence, or JSON ─▶ exit code
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Final

from rich.console import Console
from rich.table import Table

from actors.host.terminal_text import harmless
from supervisors.checkers.checks import PROMISES, Report, check
from supervisors.checkers.history import RunState
from supervisors.checkers.run_directory import read_history

EXIT_CLEAN: Final = 0
EXIT_VIOLATED: Final = 1
_SHOWN_MAX: Final = 10
"""Violations of one checker that the table's reader gets to see; ``--json`` has them all."""
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
        JournalUnreadable: its journal is damaged.
    """
    report = check(read_history(run_dir))
    if as_json:
        print(json.dumps({"run_dir": str(run_dir), "clean": report.clean, **report.as_map()}), flush=True)
    else:
        _print(Console(highlight=False), run_dir, report)
    return EXIT_CLEAN if report.clean else EXIT_VIOLATED


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
