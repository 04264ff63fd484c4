"""Pictures of a run as PNG files, and the console's page of it with all of them, in one file that stands alone."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Final

import numpy as np

from actors.host.plain_file import folder_to_write, put
from supervisors.api.run_files import model_name
from supervisors.cli.console.export import page_file, sections_of
from supervisors.cli.plot.figures import FIGURES, png
from supervisors.cli.plot.run_data import RunData


def draw(data: RunData, folder: Path, *, below: Path | None = None) -> list[Path]:
    """Write the pictures and the page into ``folder``; returns the pictures.

    Raises:
        ConfigError: ``folder`` leads out of ``below``.
        OSError: it cannot be written.
    """
    pictures = {name: png(figure) for name, make in FIGURES.items() if (figure := make(data)) is not None}
    if data.run_dir is None:  # those of services have a name of their own, beside those of a job
        pictures = {_OF_SERVICES.get(name, name): content for name, content in pictures.items()}
    captioned = {name: (content, _CAPTIONS.get(name, "")) for name, content in pictures.items()}
    sections = sections_of(data.run_dir) if data.run_dir is not None else None
    page = page_file(data.name, _facts(data), captioned, settings=data.settings, sections=sections)
    with folder_to_write(folder, below=below) as opened:
        for name, content in pictures.items():
            put(opened, f"{name}.png", content)
        put(opened, "index.html", page.encode("utf-8", "replace"))
    return [folder / f"{name}.png" for name in pictures]


_OF_SERVICES: Final = {"occupancy": "services"}


_CAPTIONS: Final = {
    "occupancy": "Above: how busy each process was; the percentage beside its name is the share of all the time it "
    "was there, start-up, commits and loading of weights included. Below: some steps of it. A bubble, pale, is time in "
    "which a process was there and had nothing to do: a worker without samples or a trainer that waits for them.",
    "services": "Each lane is a job on a training service that it shares with others: its bursts, waits and switches.",
    "lengths": "Response tokens of the samples that were trained. Right: of each step's samples, by percentile.",
    "evaluation": "On prompts that are not trained on. avg@k: mean reward of k responses; pass@k: one of k passes.",
    "reward": "Pale: each step. Strong: the running mean over a twentieth of the steps.",
    "learning": "Pale: each step. Strong: the running mean over a twentieth of the steps.",
    "throughput": "Pale: each step. Strong: the running mean over a twentieth of the steps. Idle shares are those of "
    "metrics.jsonl: the workers' is a share of the engines' time from one commit until the step's last sample was "
    "granted, the trainer's a share of its step from opening it to before the commit. The percentages of the first "
    "picture are shares of the whole run, so the two need not add up to 100 %.",
}
"""Picture → its caption: what it shows, and what its shares refer to."""


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
