"""The pictures of a run. Each function takes the data and returns a figure, or None if there is nothing to draw.

occupancy     how busy each process was over the run, and a close look at some steps: bubbles are the pale gaps
lengths       how long responses are, early and late, and how the tail moves
reward        reward by step; with length ranking, how much of the tail it found
evaluation    avg@k and pass@k on held-out prompts, by version
learning      loss, entropy, KL, gradient norm, staleness, spread of rewards
throughput    samples and tokens a second, and the idle shares
"""

from __future__ import annotations

import io
import itertools
from typing import Any, Final, cast

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import LinearSegmentedColormap
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from supervisors.cli.plot.run_data import BESIDE, BUBBLES, Bar, RunData, busy_fraction, presence

COLOURS: Final = {
    "generate": "#3f74b5", "train": "#e08a2e", "publish": "#8a5fb0", "pull": "#4f9d69", "checkpoint": "#7a7a7a",
    "burst": "#e08a2e", "switch": "#8a5fb0", "prefetch": "#4f9d69",
    "score": "#d9b44a", "episode": "#26868c", "answer": "#94714f",
    "idle": "#eceae6", "wait": "#eceae6", "asleep": "#b9c7c4",
}  # fmt: skip
_OTHER: Final = "#b8a088"
_BUSY: Final = LinearSegmentedColormap.from_list("busy", [COLOURS["idle"], "#9db8d9", "#3f74b5", "#1d3f6b"])
INK: Final = "#333333"
WIDTH: Final = 11.0
_BINS: Final = 160
_ACROSS: Final = 3
"""Diagrams in one row."""
_CLOSE_STEPS: Final = 6
"""Steps that the close look shows."""


def occupancy(data: RunData) -> Figure | None:
    """Lanes of all processes: the whole run as shares of time, and a few steps of it bar by bar."""
    if not data.lanes or data.end_s <= 0.0:
        return None
    lanes = len(data.lanes)
    figure = _figure(2.2 + 0.75 * lanes)
    over, close = figure.subplots(2, 1, gridspec_kw={"height_ratios": [1.0, 1.3]})
    _shares(over, data)
    draw_bars(close, data, *_close_look(data))
    seen = dict.fromkeys(bar.name for bars in data.lanes.values() for bar in bars)
    shown = [name for name in seen if name not in BUBBLES]
    patches = [Patch(color=COLOURS.get(name, _OTHER), label=name) for name in shown]
    patches.append(Patch(facecolor=COLOURS["idle"], edgecolor="#cccccc", label="bubble: there, with nothing to do"))
    patches.append(Patch(facecolor="white", edgecolor="#cccccc", label="not there"))
    figure.legend(handles=patches, loc="outside lower center", ncols=len(patches), frameon=False, fontsize=9)
    return figure


def _shares(axes: Axes, data: RunData) -> None:
    edges = np.linspace(0.0, data.end_s, _BINS + 1)
    shares = np.array([_there(bars, edges) for bars in data.lanes.values()])
    image = axes.imshow(
        shares, aspect="auto", cmap=_BUSY, vmin=0, vmax=1, interpolation="nearest",
        extent=(0.0, data.end_s, len(shares) - 0.5, -0.5),
    )  # fmt: skip
    axes.figure.colorbar(image, ax=axes, label="busy", pad=0.01, aspect=10)
    axes.set_yticks(range(len(data.lanes)), [_share_label(data, lane) for lane in data.lanes])
    axes.set_xlabel("seconds since the start", color=INK)
    axes.tick_params(axis="y", length=0)
    axes.set_title("Busy share of each process, of all the time that it was there", loc="left", fontsize=11, color=INK)
    axes.spines[:].set_visible(False)


def _there(bars: list[Bar], edges: np.ndarray) -> list[float]:
    """Busy shares between ``edges``; NaN, which is left white, where the lane's process was not there."""
    there = presence(bars)
    return [
        busy_fraction(bars, a, b) if any(begin < b and end > a for begin, end in there) else float("nan")
        for a, b in itertools.pairwise(edges)
    ]


def _share_label(data: RunData, lane: str) -> str:
    """The lane's name, and its busy share of the time that it was there."""
    bars = data.lanes[lane]
    there = presence(bars)
    there_s = sum(b - a for a, b in there)
    busy_s = sum(busy_fraction(bars, a, b) * (b - a) for a, b in there)
    return f"{lane}  {busy_s / there_s:.0%}" if there_s else lane


def _close_look(data: RunData) -> tuple[float, float]:
    """Start and end of the close look: a few steps from the middle of the run, or all of it if there are no more."""
    seconds = data.column("seconds")
    seconds = seconds[np.isfinite(seconds)]
    window_s = _CLOSE_STEPS * float(np.median(seconds)) if len(seconds) else data.end_s
    trained = [bar for bar in data.lanes.get("trainer", []) if bar.name == "train"]
    middle_s = trained[len(trained) // 2].start_s if trained else data.end_s / 2
    start_s = max(0.0, min(middle_s - window_s / 2, data.end_s - window_s))
    return start_s, min(start_s + window_s, data.end_s)


def draw_bars(axes: Axes, data: RunData, start_s: float, end_s: float) -> None:
    for row, bars in enumerate(data.lanes.values()):
        there = [(max(a, start_s), min(b, end_s)) for a, b in presence(bars) if a < end_s and b > start_s]
        axes.broken_barh([(a, b - a) for a, b in there], (row - 0.36, 0.72), facecolors=COLOURS["idle"])
        for name in dict.fromkeys(bar.name for bar in bars if bar.name not in BUBBLES):
            inside = [
                (max(bar.start_s, start_s), min(bar.end_s, end_s))
                for bar in bars
                if bar.name == name and bar.end_s > start_s and bar.start_s < end_s
            ]
            place = (row + 0.2, 0.16) if name in BESIDE else (row - 0.36, 0.72)
            axes.broken_barh([(a, b - a) for a, b in inside], place, facecolors=COLOURS.get(name, _OTHER))
    axes.set_yticks(range(len(data.lanes)), list(data.lanes))
    axes.set_ylim(len(data.lanes) - 0.5, -0.5)
    axes.set_xlim(start_s, end_s)
    axes.set_xlabel("seconds since the start", color=INK)
    axes.set_title(f"A close look: {end_s - start_s:.1f} s from its middle", loc="left", fontsize=11, color=INK)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.tick_params(axis="y", length=0)


def lengths(data: RunData) -> Figure | None:
    """Response lengths: of the first and the last third of the run, and percentiles by step."""
    if not data.lengths:
        return None
    steps = list(data.lengths)
    third = max(1, len(steps) // 3)
    early, late = (np.concatenate([data.lengths[s] for s in part]) for part in (steps[:third], steps[-third:]))
    figure = _figure(3.6)
    left, right = figure.subplots(1, 2)
    longest = max(int(early.max(initial=1)), int(late.max(initial=1)))
    edges = np.linspace(0, longest + 1, min(longest + 2, 41))
    parts = (
        (early, f"steps {steps[0]} to {steps[third - 1]}", "#9db8d9"),
        (late, f"steps {steps[-third]} to {steps[-1]}", "#e08a2e"),
    )
    for values, label, colour in parts if len(steps) > 1 else parts[:1]:
        weights = np.full(len(values), 100.0 / max(1, len(values)))
        filled: dict[str, Any] = {"color": colour, "histtype": "stepfilled", "alpha": 0.45}
        left.hist(values, edges, weights=weights, label=label, **filled)
        left.hist(values, edges, weights=weights, color=colour, histtype="step", linewidth=1.4)
    dress(left, "How long responses are", "response tokens", "% of samples")
    left.legend(frameon=False, fontsize=9)
    for percentile, colour in ((50, "#9db8d9"), (90, "#3f74b5"), (99, "#1d3f6b")):
        values = np.array([np.percentile(data.lengths[s], percentile) for s in steps])
        right.plot(steps, _smooth(values), color=colour, label=f"P{percentile}")
    dress(right, "The tail, step by step", "step", "response tokens")
    right.set_ylim(0, 1.2 * longest)
    right.legend(frameon=False, fontsize=9, ncols=3)
    return figure


def reward(data: RunData) -> Figure | None:
    """Mean reward by step; beside it the recall of the length ranking where there is one."""
    values = data.column("reward_mean")
    if not np.isfinite(values).any():
        return None
    steps = data.column("step")
    recalls = {name: data.column(f"length_recall_{name}") for name in ("20", "10", "5")}
    ranked = any(np.isfinite(column).any() for column in recalls.values())
    figure = _figure(3.4)
    if ranked:
        axes, beside = figure.subplots(1, 2)
        for (name, column), colour in zip(recalls.items(), ("#1d3f6b", "#3f74b5", "#9db8d9"), strict=True):
            beside.plot(steps, _smooth(column), color=colour, label=f"longest {name} %")
            beside.axhline(int(name) / 100, color=colour, linewidth=0.8, linestyle=":")
        dress(beside, "Found by the length ranking (dotted: by chance)", "step", "recall")
        beside.set_ylim(0, 1.02)
        beside.legend(frameon=False, fontsize=9)
    else:
        axes = figure.subplots()
    axes.plot(steps, values, color="#e08a2e", alpha=0.35, linewidth=1.0)
    axes.plot(steps, _smooth(values), color="#e08a2e", linewidth=2.0)
    dress(axes, "Reward", "step", "mean reward")
    return figure


def evaluation(data: RunData) -> Figure | None:
    """Held-out evaluation by version: avg@k, and pass@k for each k."""
    if not data.evaluations:
        return None
    figure = _figure(3.2)
    axes = figure.subplots()
    versions = [float(cast("int", row["version"])) for row in data.evaluations]
    k = data.evaluations[-1].get("k", "k")
    curves = {f"avg@{k}": [row["avg_at_k"] for row in data.evaluations]}
    passes = [cast("dict[str, float | None]", row["pass_at_k"]) for row in data.evaluations]
    curves |= {f"pass@{n}": [of.get(n) for of in passes] for n in passes[-1] if n != "1" or k != 1}
    for name, values in curves.items():
        known = np.array([np.nan if value is None else cast("float", value) for value in values])
        strong = name.startswith("avg")
        axes.plot(versions, known, marker="o", markersize=3, linewidth=2.0 if strong else 1.0, label=name)
    dress(axes, "Evaluation on held-out prompts", "version", "mean reward, share passed")
    axes.legend(frameon=False, fontsize=9)
    return figure


_LEARNING: Final = (
    ("loss", "loss", "Loss"), ("entropy", "nats", "Entropy of the policy"), ("kl", "nats", "KL to the reference"),
    ("grad_norm", "before clipping", "Gradient norm"), ("staleness_max", "versions", "Staleness, greatest"),
    ("reward_std", "standard deviation", "Spread of the rewards"),
)  # fmt: skip
"""Column, unit, title."""


def learning(data: RunData) -> Figure | None:
    """How training goes, without columns that no row has, and without a KL that is always 0."""
    shown = [(name, unit, title, data.column(name)) for name, unit, title in _LEARNING]
    shown = [part for part in shown if np.isfinite(part[3]).any() and (part[0] != "kl" or np.nanmax(part[3]) > 0)]
    if not shown:
        return None
    rows = -(-len(shown) // _ACROSS)
    figure = _figure(2.6 * rows)
    grid = figure.subplots(rows, _ACROSS, squeeze=False).flatten()
    steps = data.column("step")
    for axes, (_, unit, title, values) in zip(grid, shown, strict=False):
        axes.plot(steps, values, color="#3f74b5", alpha=0.35, linewidth=1.0)
        axes.plot(steps, _smooth(values), color="#3f74b5", linewidth=1.8)
        dress(axes, title, "step", unit)
    for axes in grid[len(shown) :]:
        axes.set_visible(False)
    return figure


def throughput(data: RunData) -> Figure | None:
    """Samples and tokens a second by step, and how much of the time trainer and workers were idle."""
    seconds = data.column("seconds")
    if not (np.isfinite(seconds).any() and (seconds > 0).any()):
        return None
    steps = data.column("step")
    figure = _figure(3.4)
    left, right = figure.subplots(1, 2)
    samples, tokens = data.column("samples") / seconds, data.column("tokens_generated") / seconds
    left.plot(steps, samples, color="#3f74b5", alpha=0.35, linewidth=1.0)
    left.plot(steps, _smooth(samples), color="#3f74b5", linewidth=2.0)
    dress(left, "Throughput", "step", "samples / s")
    left.set_ylim(bottom=0)
    left.yaxis.label.set_color("#3f74b5")
    of_tokens = left.twinx()
    of_tokens.plot(steps, _smooth(tokens), color="#4f9d69", linewidth=1.4)
    of_tokens.set_ylabel("tokens / s", color="#4f9d69")
    of_tokens.set_ylim(bottom=0)
    of_tokens.spines[["top"]].set_visible(False)
    for name, label, colour in (
        ("rollout_idle_fraction", "rollout workers", "#3f74b5"),
        ("trainer_idle_fraction", "trainer", "#e08a2e"),
    ):
        right.plot(steps, _smooth(100 * data.column(name)), color=colour, label=label)
    dress(right, "Idle, within a step", "step", "% of the time (see below)")
    right.set_ylim(0, 100)
    right.legend(frameon=False, fontsize=9)
    return figure


def _smooth(values: np.ndarray) -> np.ndarray:
    """A running mean over a twentieth of the steps, over the steps that have a value."""
    width = max(1, len(values) // 20)
    if width == 1:
        return values
    kernel, known = np.ones(width), np.isfinite(values)
    total = np.convolve(np.where(known, values, 0.0), kernel, "same")
    count = np.convolve(known.astype(float), kernel, "same")
    return np.where(count > 0, total / np.maximum(count, 1), np.nan)


def png(figure: Figure) -> bytes:
    """The picture as a PNG file."""
    file = io.BytesIO()
    figure.savefig(file)
    return file.getvalue()


def _figure(height: float) -> Figure:
    return Figure(figsize=(WIDTH, height), dpi=130, layout="constrained")


def dress(axes: Axes, title: str, x: str, y: str) -> None:
    """Title, labels and grid as all pictures have them."""
    axes.set_title(title, loc="left", fontsize=11, color=INK)
    axes.set_xlabel(x, color=INK)
    axes.set_ylabel(y, color=INK)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", color="#e4e4e4", linewidth=0.7)
    axes.set_axisbelow(True)


FIGURES: Final = {
    "occupancy": occupancy,
    "lengths": lengths,
    "reward": reward,
    "evaluation": evaluation,
    "learning": learning,
    "throughput": throughput,
}
"""File name → what draws it, in the order of the page."""
