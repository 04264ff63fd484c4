"""What a person sees of a run: a panel that renews itself on a terminal, one plain line a step elsewhere.

    run_job ── on_progress({...}) ──▶ ProgressView ──▶ rich.Live (terminal) | print (file, pipe)

``on_progress`` is called with a map; each call tells what is new, and the view keeps the rest. Keys that it shows:
``state``, ``steps``, ``workers``, ``waiting_for`` (who waits for whom, as a phrase), ``message`` (something to be told
once, such as a restart), ``evaluation`` (the newest one, as a line), ``phase`` with ``phase_done``, ``phase_total`` and
``phase_unit`` (work before the first step), and with ``step`` the columns of ``metrics.jsonl``.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Mapping
from types import TracebackType
from typing import Any, Final, Self

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from actors.core.terminal_text import harmless
from supervisors.api.step_line import figure, step_line, tokens_per_second
from supervisors.cli.outlook import PhaseProgress, duration, seconds_left, trend

RECENT_STEPS: Final = 8
REWARDS_SHOWN: Final = 60
_BARS: Final = "▁▂▃▄▅▆▇█"


class ProgressView:
    """A progress view is a context manager that shows progress on ``console`` while it is open."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._now: dict[str, Any] = {}
        self._rows: deque[dict[str, Any]] = deque(maxlen=RECENT_STEPS)
        self._rewards: deque[float] = deque(maxlen=REWARDS_SHOWN)
        self._phase = PhaseProgress()
        self._live = Live(console=console, auto_refresh=False, transient=False) if console.is_terminal else None

    def __enter__(self) -> Self:
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._live is not None:
            self._live.stop()

    def update(self, progress: Mapping[str, Any]) -> None:
        """Take in what is new, and show it."""
        waited = self._now.get("waiting_for")
        self._now.update(progress)
        if "message" in progress and progress.get("state") != "failed":  # else it is the reason, which the end tells
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
        elif self._live is None and progress.get("waiting_for") not in (
            None,
            "",
            waited,
        ):
            self._say(f"waiting for {progress['waiting_for']}")
        if self._live is not None:
            self._live.update(self.render(), refresh=True)

    def _say(self, line: str) -> None:
        self._console.print(harmless(line), markup=False, highlight=False, soft_wrap=True)

    def render(self) -> RenderableType:
        """The panel as it stands."""
        now = self._now
        step, steps = int(now.get("step", 0)), int(now.get("steps", 0))
        head = Table.grid(padding=(0, 2))
        if self._phase.name:
            bar = ProgressBar(total=max(self._phase.total, 1), completed=self._phase.done, width=30)
            head.add_row(Text(self._phase.name, style="bold"), bar, self._phase.amount(), self._phase.left())
        else:
            bar = ProgressBar(total=max(steps, 1), completed=step, width=30)
            left_s = seconds_left([float(row.get("seconds", 0)) for row in self._rows], step, steps)
            cells = [Text(f"step {step}/{steps}" if steps else "", style="bold"), bar, Text(str(now.get("state", "")))]
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
        table = Table(box=None, padding=(0, 2), header_style="dim")
        for title in (
            "step",
            "reward",
            "dropped",
            "tokens/s",
            "tokens/\nanswer",
            "stale-\nness",
            "rollout idle",
            "trainer idle",
            "seconds",
        ):
            table.add_column(title, justify="right")
        for row in self._rows:
            table.add_row(*_cells(row))
        return table


def _cells(row: Mapping[str, Any]) -> list[str]:
    return [
        str(row["step"]),
        figure(row, "reward_mean", ".3f"),
        str(row.get("samples_dropped", 0)),
        f"{tokens_per_second(row):,.0f}",
        figure(row, "response_tokens_mean", ".1f"),
        str(row.get("staleness_max", 0)),
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
