"""Shows the progress of runs: a panel or a table that redraws itself on a terminal, plain lines elsewhere.

    run_head ── on_progress({...}) ──▶ view ─┬─▶ rich.Live (terminal)
                                             └─▶ print: a line a step (file, pipe)

    ProgressView   one job: bar, reward, evaluation, the last steps
    JobsView       several jobs side by side: a row each

``on_progress`` is called with a map of new values; the view keeps the earlier ones. The keys that it shows:
``of_job``, ``state``, ``steps``, ``workers``, ``waiting_for`` (what the job waits for, as a phrase), ``message`` (shown
once, such as a restart), ``evaluation`` (the newest one, as a line), ``phase`` with ``phase_done``,
``phase_total`` and ``phase_unit`` (work before the first step), and with ``step`` the columns of ``metrics.jsonl``;
``step`` itself counts the steps that are done, while a step's number, which is shown beside its figures, is from 0 on.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final, Self

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from actors.core.terminal_text import harmless
from supervisors.api.step_line import figure, step_line, tokens_per_second
from supervisors.cli.running.job_lines import JobLines
from supervisors.cli.running.outlook import PhaseProgress, duration, seconds_left, trend

if TYPE_CHECKING:
    from configs.schema import JobConfig

RECENT_STEPS: Final = 8
REWARDS_SHOWN: Final = 60
_BARS: Final = "▁▂▃▄▅▆▇█"
_FOLDED: Final = 16
"""Width to which text in the last column of a table may be folded."""


def view_of(jobs: Sequence[JobConfig], console: Console, *, several: bool) -> View:
    """A table for ``several`` jobs, else a panel."""
    return JobsView(console, {job.name: job.steps for job in jobs}) if several else ProgressView(console)


class View(ABC):
    """A context manager that, while it is open, shows on ``console`` what ``update`` is given."""

    def __init__(self, console: Console) -> None:
        self._console = console
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
        """Take in new values, and show them."""
        self._take(progress)
        if self._live is not None:
            self._live.update(self.render(), refresh=True)

    @abstractmethod
    def _take(self, progress: Mapping[str, Any]) -> None:
        """Keep the new values, and print those that are shown as lines."""

    @abstractmethod
    def render(self) -> RenderableType:
        """The panel or table as it stands."""

    def _say(self, line: str) -> None:
        self._console.print(harmless(line), markup=False, highlight=False, soft_wrap=True)


class JobsView(View):
    """Shows a table with a row for each job. ``jobs`` maps their names to their numbers of steps."""

    def __init__(self, console: Console, jobs: Mapping[str, int]) -> None:
        super().__init__(console)
        self._lines = JobLines(self._say)
        for job, steps in jobs.items():
            self._lines.update({"of_job": job, "steps": steps})
        self._rows: dict[str, dict[str, Any]] = {job: {"steps": steps} for job, steps in jobs.items()}

    def _take(self, progress: Mapping[str, Any]) -> None:
        job = str(progress.get("of_job", ""))
        if job in self._rows:
            self._rows[job].update(progress)
        if self._live is None:
            self._lines.update(progress)
        elif "message" in progress:
            self._say(f"{job}: {progress['message']}" if job else str(progress["message"]))

    def render(self) -> Table:
        titles = ("job", "state", "steps", "reward", "tokens/s", "seconds", "waits for")
        rows = [[job, *_job_cells(row)] for job, row in self._rows.items()]
        leave_first, text = ("seconds", "tokens/s", "state", "waits for"), ("job", "state", "waits for")
        return _fitting(titles, rows, self._console.width, leave_first, text)


def _job_cells(row: Mapping[str, Any]) -> list[str]:
    state = harmless(str(row.get("state", "")))
    step = f"{row.get('step', 0)}/{row['steps']}"
    if row.get("reward_mean") is None:
        return [state, step, "–", "–", "–", harmless(str(row.get("phase", "")))]
    waits = harmless(str(row.get("waiting_for") or ""))
    return [state, step, f"{float(row['reward_mean']):.3f}", f"{tokens_per_second(row):,.0f}",
            f"{float(row.get('seconds', 0)):.2f}", waits]  # fmt: skip


class ProgressView(View):
    """Shows a panel of one job."""

    def __init__(self, console: Console) -> None:
        super().__init__(console)
        self._now: dict[str, Any] = {}
        self._rows: deque[dict[str, Any]] = deque(maxlen=RECENT_STEPS)
        self._rewards: deque[float] = deque(maxlen=REWARDS_SHOWN)
        self._phase = PhaseProgress()

    def _take(self, progress: Mapping[str, Any]) -> None:
        waited = self._now.get("waiting_for")
        self._now.update(progress)
        if "message" in progress and progress.get("state") != "failed":  # the command tells why a job failed
            self._say(str(progress["message"]))
        if "phase" in progress:
            self._phase.update(progress, time.monotonic())
            if self._live is None and (line := self._phase.line()) is not None:
                self._say(line)
        if "step" in progress and "reward_mean" in progress:
            self._rows.append(dict(progress))
            if progress["reward_mean"] is not None:
                self._rewards.append(float(progress["reward_mean"]))
            if self._live is None:
                self._say(step_line(progress, self._now.get("steps")))
        elif self._live is None and progress.get("waiting_for") not in (None, "", waited):
            self._say(f"waiting for {progress['waiting_for']}")

    def render(self) -> RenderableType:
        now = self._now
        step, steps = int(now.get("step", 0)), int(now.get("steps", 0))
        head = Table.grid(padding=(0, 2))
        if self._phase.name:
            bar = ProgressBar(total=max(self._phase.total, 1), completed=self._phase.done, width=30)
            head.add_row(Text(self._phase.name, style="bold"), bar, self._phase.amount(), self._phase.left())
        else:
            bar = ProgressBar(total=max(steps, 1), completed=step, width=30)
            left_s = seconds_left([float(row.get("seconds", 0)) for row in self._rows], step, steps)
            cells = [
                Text(f"{step} of {steps} steps" if steps else "", style="bold"),
                bar,
                Text(str(now.get("state", ""))),
            ]
            cells += [Text(f"{duration(left_s)} left")] if left_s else []
            cells += [Text(f"workers {now['workers']}")] if "workers" in now else []
            head.add_row(*cells)
        parts: list[RenderableType] = [head]
        if self._rows:
            rewards = list(self._rewards)
            curve = f"reward {sparkline(rewards)} {figure(self._rows[-1], 'reward_mean', '.3f')}  {trend(rewards)}"
            parts.append(Text(curve, style="green"))
            parts.append(self._table())
        if now.get("evaluation"):
            parts.append(Text(harmless(str(now["evaluation"])), style="cyan"))
        if now.get("waiting_for"):
            parts.append(Text(f"waiting for {harmless(str(now['waiting_for']))}", style="yellow"))
        return Group(*parts)

    def _table(self) -> Table:
        return _fitting(_TITLES, [_cells(row) for row in self._rows], self._console.width, _LEAVE_FIRST)


_TITLES: Final = (
    "step", "reward", "dropped", "tokens/s", "tokens/\nanswer", "stale-\nness", "rollout\nidle", "trainer\nidle",
    "seconds",
)  # fmt: skip
_LEAVE_FIRST: Final = ("stale-\nness", "dropped", "tokens/\nanswer", "seconds", "trainer\nidle", "rollout\nidle")


def _fitting(
    titles: Sequence[str], rows: list[list[str]], width: int, leave_first: Sequence[str], text: Sequence[str] = ()
) -> Table:
    """A table without the columns for which ``width`` has no room: a name or a number is never cut.

    ``text``: columns that begin at the left, the last of which may be folded.
    """
    gaps = 2
    sizes = [
        gaps + max(len(part) for cell in (title, *(row[at] for row in rows)) for part in cell.split("\n"))
        for at, title in enumerate(titles)
    ]
    if text:
        sizes[-1] = min(sizes[-1], _FOLDED)
    shown = list(range(len(titles)))
    for title in leave_first:
        if sum(sizes[at] for at in shown) > width:
            shown.remove(titles.index(title))
    table = Table(box=None, padding=(0, 1), header_style="dim")
    for at in shown:
        folded = bool(text) and at == len(titles) - 1
        table.add_column(titles[at], justify="left" if titles[at] in text else "right", no_wrap=not folded)
    for row in rows:
        table.add_row(*(row[at] for at in shown))
    return table


def _cells(row: Mapping[str, Any]) -> list[str]:
    return [
        str(int(row["step"]) - 1),
        figure(row, "reward_mean", ".3f"),
        str(row.get("samples_dropped", 0)),
        f"{tokens_per_second(row):,.0f}",
        figure(row, "response_tokens_mean", ".1f"),
        figure(row, "staleness_max", ".0f"),
        f"{float(row.get('rollout_idle_fraction', 0)):.0%}",
        f"{float(row.get('trainer_idle_fraction', 0)):.0%}",
        f"{float(row.get('seconds', 0)):.2f}",
    ]


def sparkline(values: list[float]) -> str:
    """Values as a line of bars, scaled from their least to their greatest (at least 0 to 1)."""
    if not values:
        return ""
    low, high = min(0.0, *values), max(1.0, *values)
    return "".join(_BARS[min(int((value - low) / (high - low) * len(_BARS)), len(_BARS) - 1)] for value in values)
