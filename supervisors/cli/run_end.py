"""What ``headrace run`` says at the end of a run, and the exit code of each end."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

from rich.console import Console

from actors.host.terminal_text import harmless
from supervisors.cli.command import EXIT_FINISHED, EXIT_INTERRUPTED

EXIT_OF_STATE: Final = {"finished": EXIT_FINISHED, "interrupted": EXIT_INTERRUPTED}
"""Exit code by the state in which a job has ended; any other has failed."""


def report(console: Console, summary: dict[str, Any], run_dir: Path) -> None:
    """The end of one job, where its files are, and how to go on."""
    first, last = summary.get("reward_first"), summary.get("reward_last")
    console.print(
        f"{summary.get('job')} {summary.get('state')} after {summary.get('steps')} steps and "
        f"{_figure(summary.get('seconds'))} s: reward {_figure(first)} → {_figure(last)}, "
        f"{summary.get('restarts', 0)} restarts, {summary.get('prompts_lost', 0)} prompts lost{_dropped(summary)}",
        soft_wrap=True,
        markup=False,
    )
    rows = [
        ("checkpoint", summary.get("checkpoint")),
        ("metrics", run_dir / "metrics.jsonl"),
        ("trace", run_dir / "trace.json"),
    ]
    for name, path in rows:
        console.print(harmless(f"  {name:<10} {path or 'none'}"), soft_wrap=True, markup=False)
    if summary.get("state") == "interrupted" or (summary.get("error") and (run_dir / "journal.db").exists()):
        console.print(harmless(f"  go on with  headrace run --resume {run_dir}"), soft_wrap=True, markup=False)
    if summary.get("error"):
        console.print(harmless(f"  error      {summary['error']}"), soft_wrap=True, markup=False)


def _dropped(summary: dict[str, Any]) -> str:
    """``, 24 of 24 samples dropped``, if any was."""
    dropped = int(summary.get("samples_dropped") or 0)
    return f", {dropped} of {dropped + int(summary.get('samples') or 0)} samples dropped" if dropped else ""


def _figure(value: object) -> str:
    return f"{value:.3g}" if isinstance(value, int | float) else "–"
