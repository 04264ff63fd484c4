"""Draws ``docs/images/story.png``: one job run synchronously and streaming, one above the other.

    PYTHONPATH=. .venv/bin/python docs/images/story.py DIR    runs both into DIR, unless they are there, and draws them

While the second one streams, a worker is killed, and comes back. A quiet machine shows most.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from supervisors.cli.plot.figures import COLOURS, INK, WIDTH, draw_bars, dress
from supervisors.cli.plot.run_data import Bar, RunData, read_run

HEADRACE = [sys.executable, str(Path(__file__).parents[2] / "main.py")]
STEPS, KILLED_AT = 150, 40


def run(run_dir: Path, mode: str, *, harm: bool) -> None:
    """Run the quickstart in ``mode``, unless it is there; ``harm``: a worker is killed."""
    if run_dir.exists():
        return
    sets = ("--set", f"steps={STEPS}", "--set", f"sync.mode={mode}", "--dir", str(run_dir))
    with subprocess.Popen([*HEADRACE, "run", "configs/quickstart.yaml", *sets]) as job:
        if harm:
            wait_for(job, run_dir, KILLED_AT)
            os.kill(next(row["pid"] for row in tree(run_dir) if row["name"] == "rollout-1"), signal.SIGKILL)


def wait_for(job: subprocess.Popen[bytes], run_dir: Path, steps: int) -> None:
    """Return when the run in ``run_dir`` has that many steps, or is over."""
    metrics = run_dir / "metrics.jsonl"
    while job.poll() is None and (not metrics.exists() or metrics.read_bytes().count(b"\n") < steps):
        time.sleep(0.1)


def tree(run_dir: Path) -> Any:
    """The rows of ``headrace ctl tree``."""
    command = [*HEADRACE, "ctl", "--control", str(run_dir), "--json", "tree"]
    return json.loads(subprocess.run(command, capture_output=True, check=True).stdout)


def main(sync_dir: Path, stream_dir: Path) -> None:
    """Draw the runs in two directories."""
    sync, stream = _work(read_run(sync_dir)), _work(read_run(stream_dir))
    figure = Figure(figsize=(WIDTH, 7.2), dpi=130, layout="constrained")
    heights = [len(sync.lanes), 1.35 * len(stream.lanes), 3.2]
    above, below, rewards = figure.subplots(3, 1, sharex=True, gridspec_kw={"height_ratios": heights})
    end_s = max(sync.end_s, stream.end_s)
    _lanes(
        above, sync, end_s, f"Synchronous: {len(sync.rows)} steps in {sync.end_s:.0f} s; trainer and workers take turns"
    )
    title = f"Streaming, the same job: {len(stream.rows)} steps in {stream.end_s:.0f} s, through a death and a return"
    _lanes(below, stream, end_s, title)
    _told(below, stream_dir, stream)
    for data, colour, label in ((sync, "#9a9a9a", "synchronous"), (stream, "#e08a2e", "streaming")):
        values = _running_mean(data.column("reward_mean"))
        rewards.plot(_ends_s(data), values, color=colour, linewidth=2, label=label)
    dress(rewards, "The reward rises through it", "seconds", "mean reward")
    rewards.legend(frameon=False, fontsize=9, loc="lower right")
    names = {"generate": "workers generate", "train": "trainer trains", "idle": "there, with nothing to do"}
    patches = [Patch(color=COLOURS[name], label=label) for name, label in names.items()]
    patches.append(Patch(facecolor="white", edgecolor="#cccccc", label="not there"))
    figure.legend(handles=patches, loc="outside lower center", ncols=4, frameon=False, fontsize=9)
    figure.savefig(Path(__file__).with_name("story.png"))


def _work(data: RunData) -> RunData:
    """The lanes of trainer and workers alone, from the first token on."""
    lanes = {name: bars for name, bars in data.lanes.items() if name == "trainer" or name.startswith("rollout")}
    begin_s = min(bar.start_s for bars in lanes.values() for bar in bars if bar.name == "generate")
    moved = {
        name: [Bar(bar.name, bar.start_s - begin_s, bar.end_s - begin_s) for bar in bars if bar.end_s > begin_s]
        for name, bars in lanes.items()
    }
    return RunData(name=data.name, lanes=moved, rows=data.rows)


def _lanes(axes: Axes, data: RunData, end_s: float, title: str) -> None:
    draw_bars(axes, data, 0.0, end_s)
    axes.set_xlabel("")
    axes.set_title(title, loc="left", fontsize=11, color=INK)


def _ends_s(data: RunData) -> np.ndarray:
    """When each step ended: the last step with the trainer's last bar."""
    seconds = np.cumsum(data.column("seconds"))
    return seconds + (data.end_s - seconds[-1])


def _running_mean(values: np.ndarray, width: int = 5) -> np.ndarray:
    return np.array([np.nanmean(values[max(0, i - width + 1) : i + 1]) for i in range(len(values))])


def _told(axes: Axes, run_dir: Path, data: RunData) -> None:
    """Write above the lanes what happened to whom."""
    events = [json.loads(line) for line in (run_dir / "events.jsonl").read_text().splitlines()]
    trace = json.loads((run_dir / "trace.json").read_text())
    begin_s = min(event["ts"] for event in trace if event.get("name") == "generate") / 1e6
    names = list(data.lanes)
    joined = [event for event in events if event["event"] == "worker_registered"]
    down = next(event for event in events if event["event"] == "worker_down")
    back = next(event for event in joined if event["worker"] == down["worker"] and event["time_s"] > down["time_s"])
    for text, event, side in (("killed: its samples go on elsewhere ", down, "right"), (" back", back, "left")):
        at, row = event["time_s"] - begin_s, names.index(event["worker"])
        axes.plot([at, at], [row - 0.45, row + 0.45], color=INK, linewidth=1.4)
        box = {"facecolor": "white", "edgecolor": "none", "pad": 1.5}
        axes.annotate(text, (at, row - 0.5), fontsize=9, color=INK, ha=side, va="center", bbox=box)


if __name__ == "__main__":
    root = Path(sys.argv[1])
    run(root / "synchronous", "sync", harm=False)
    run(root / "streaming", "async", harm=True)
    main(root / "synchronous", root / "streaming")
