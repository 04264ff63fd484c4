"""All pictures of a run in one HTML file that stands alone, and each of them as a PNG beside it."""

from __future__ import annotations

import base64
import html
import time
from pathlib import Path
from typing import Final

import numpy as np

from supervisors.api.run_files import model_name
from supervisors.cli.plot.figures import FIGURES
from supervisors.cli.plot.run_data import RunData


def draw(data: RunData, folder: Path) -> list[Path]:
    """Write the pictures and the page into ``folder``; returns the pictures."""
    folder.mkdir(parents=True, exist_ok=True)
    pictures: list[Path] = []
    for name, make in FIGURES.items():
        if (figure := make(data)) is not None:
            path = folder / f"{name}.png"
            figure.savefig(path)
            pictures.append(path)
    (folder / "index.html").write_text(_page(data.name, _facts(data), pictures, data.settings), encoding="utf-8")
    return pictures


_CAPTIONS: Final = {
    "occupancy": "Above: how busy each process was; the percentage beside its name is the share of all the time it "
    "was there, start-up, commits and loading of weights included. Below: some steps of it. A bubble, pale, is time in "
    "which a process was there and had nothing to do: a worker without samples or a trainer that waits for them.",
    "lengths": "Response tokens of the samples that were trained. Right: of each step's samples, by percentile.",
    "evaluation": "On prompts that are not trained on. avg@k: mean reward of k responses; pass@k: one of k passes.",
    "reward": "Pale: each step. Strong: the running mean over a twentieth of the steps.",
    "learning": "Pale: each step. Strong: the running mean over a twentieth of the steps.",
    "throughput": "Pale: each step. Strong: the running mean over a twentieth of the steps. Idle shares are those of "
    "metrics.jsonl: the workers' is a share of the engines' time from one commit until the step's last sample was "
    "granted, the trainer's a share of its step from opening it to before the commit. The percentages of the first "
    "picture are shares of the whole run, so the two need not add up to 100 %.",
}
"""What a picture shows, and of what its shares are shares."""


def _facts(data: RunData) -> list[tuple[str, str]]:
    job = data.job
    parts = {
        name: job[name] if isinstance(job.get(name), dict) else {} for name in ("model", "algorithm", "sync", "data")
    }
    facts: list[tuple[str, str]] = []
    if job or data.rows:
        facts.append(("steps", f"{len(data.rows)} of {job['steps']}" if "steps" in job else f"{len(data.rows)}"))
    if model := model_name(parts["model"]):
        facts.insert(0, ("model", model))
    if data.began_s:
        facts.insert(0, ("begun", time.strftime("%Y-%m-%d %H:%M", time.localtime(data.began_s))))
    facts += [
        (label, str(parts[section][key]))
        for section, key, label in (("data", "source", "data"), ("algorithm", "name", "rule"), ("sync", "mode", "mode"))
        if key in parts[section]
    ]
    if data.rows:
        rewards, seconds, samples = (data.column(name) for name in ("reward_mean", "seconds", "samples"))
        facts.append(("reward", f"{_mean(rewards[:5])} → {_mean(rewards[-5:])}"))
        facts.append(("samples / s", f"{np.nansum(samples) / max(np.nansum(seconds), 1e-9):.1f}"))
        for name, label in (
            ("rollout_idle_fraction", "rollout idle, until a step's last sample"),
            ("trainer_idle_fraction", "trainer idle, of its step"),
        ):
            facts.append((label, f"{np.nanmean(data.column(name)):.0%}"))
    if data.lengths:
        every = np.concatenate(list(data.lengths.values()))
        facts.append(("response tokens", f"P50 {np.percentile(every, 50):.0f}, P99 {np.percentile(every, 99):.0f}"))
    return facts


def _mean(values: np.ndarray) -> str:
    """The mean of the numbers that there are: a step without samples has no reward."""
    known = values[np.isfinite(values)]
    return f"{known.mean():.3f}" if len(known) else "–"


_STYLE: Final = """
body { font: 15px/1.5 system-ui, sans-serif; color: #333; margin: 2rem auto; max-width: 70rem; padding: 0 1rem; }
h1 { font-weight: 600; font-size: 1.5rem; margin-bottom: 0.5rem; }
dl { display: flex; flex-wrap: wrap; gap: 0.5rem 2.5rem; margin: 0 0 1.5rem; }
dt { color: #777; font-size: 0.8rem; } dd { margin: 0; font-size: 1.15rem; font-variant-numeric: tabular-nums; }
figure { margin: 0.75rem 0 1.5rem; } figcaption { color: #666; font-size: 0.85rem; max-width: 60rem; }
img { width: 100%; height: auto; } pre { font-size: 0.8rem; background: #f6f5f2; padding: 1rem; overflow-x: auto; }
"""


def _page(name: str, facts: list[tuple[str, str]], pictures: list[Path], settings: str = "") -> str:
    """One file that stands alone: the pictures are inside."""
    items = "".join(f"<div><dt>{html.escape(k)}</dt><dd>{html.escape(v)}</dd></div>" for k, v in facts)
    images = "\n".join(
        f'<figure><img alt="{path.stem}" src="data:image/png;base64,{base64.b64encode(path.read_bytes()).decode()}">'
        f"<figcaption>{html.escape(_CAPTIONS.get(path.stem, ''))}</figcaption></figure>"
        for path in pictures
    )
    whole = f"<details><summary>Settings: job.yaml</summary><pre>{html.escape(settings)}</pre></details>"
    title = html.escape(name)
    head = f'<meta charset="utf-8"><meta name="viewport" content="width=device-width"><title>{title}</title>'
    return (
        f"<!doctype html>\n<html lang=en><head>{head}<style>{_STYLE}</style></head>\n"
        f"<body><h1>{title}</h1><dl>{items}</dl>\n{images}\n{whole if settings else ''}\n</body></html>\n"
    )
