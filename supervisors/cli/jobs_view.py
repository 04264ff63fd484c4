"""What a person sees of several jobs that run side by side: a line a job on a terminal, plain lines elsewhere.

run_jobs ── on_progress({of_job, …}) ──▶ JobsView ─┬─▶ rich.Live: job, state, step, reward, seconds, what it waits for
                                                   └─▶ JobLines (file, pipe)
"""

from __future__ import annotations

from collections.abc import Mapping
from types import TracebackType
from typing import Any, Self

from rich.console import Console
from rich.live import Live
from rich.table import Table

from actors.host.terminal_text import harmless
from supervisors.cli.job_lines import JobLines
from supervisors.cli.live_view import tokens_per_second


class JobsView:
    """A jobs view is a context manager that shows what becomes of ``jobs`` while it is open."""

    def __init__(self, console: Console, jobs: Mapping[str, int]) -> None:
        """``jobs``: steps by name."""
        self._console = console
        self._lines = JobLines(self._say)
        for job, steps in jobs.items():
            self._lines.update({"of_job": job, "steps": steps})
        self._rows: dict[str, dict[str, Any]] = {job: {"steps": steps} for job, steps in jobs.items()}
        self._live = Live(console=console, auto_refresh=False, transient=False) if console.is_terminal else None

    def __enter__(self) -> Self:
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._live is not None:
            self._live.stop()

    def update(self, progress: Mapping[str, Any]) -> None:
        """Take in what is new, and show it."""
        job = str(progress.get("of_job", ""))
        if job in self._rows:
            self._rows[job].update(progress)
        if self._live is None:
            self._lines.update(progress)
            return
        if "message" in progress:
            self._say(f"{job}: {progress['message']}" if job else str(progress["message"]))
        self._live.update(self.render(), refresh=True)

    def _say(self, line: str) -> None:
        self._console.print(harmless(line), markup=False, highlight=False, soft_wrap=True)

    def render(self) -> Table:
        """The table as it stands."""
        table = Table(box=None, padding=(0, 2), header_style="dim")
        for title in ("job", "state", "step", "reward", "tokens/s", "seconds", "waits for"):
            table.add_column(title, justify="left" if title in ("job", "state", "waits for") else "right")
        for job, row in self._rows.items():
            table.add_row(job, *_cells(row))
        return table


def _cells(row: Mapping[str, Any]) -> list[str]:
    state = harmless(str(row.get("state", "")))
    step = f"{row.get('step', 0)}/{row['steps']}"
    if row.get("reward_mean") is None:
        phase = harmless(str(row.get("phase", "")))
        return [state, step, "–", "–", "–", phase]
    waits = harmless(str(row.get("waiting_for") or ""))
    return [state, step, f"{float(row['reward_mean']):.3f}", f"{tokens_per_second(row):,.0f}",
            f"{float(row.get('seconds', 0)):.2f}", waits]  # fmt: skip
