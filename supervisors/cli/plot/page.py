"""All pictures of a run in one HTML file that stands alone, and each of them as a PNG beside it."""

from __future__ import annotations

import base64
import html
from pathlib import Path
from typing import Final

import numpy as np

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
    (folder / "index.html").write_text(_page(data.name, _facts(data), pictures), encoding="utf-8")
    return pictures


def _facts(data: RunData) -> list[tuple[str, str]]:
    facts = [("steps", f"{len(data.rows)}")]
    if data.rows:
        rewards, seconds, samples = (data.column(name) for name in ("reward_mean", "seconds", "samples"))
        facts.append(("reward", f"{_mean(rewards[:5])} → {_mean(rewards[-5:])}"))
        facts.append(("samples / s", f"{np.nansum(samples) / max(np.nansum(seconds), 1e-9):.1f}"))
        for name, label in (("rollout_idle_fraction", "rollout idle"), ("trainer_idle_fraction", "trainer idle")):
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
img { width: 100%; height: auto; margin: 0.75rem 0; }
"""


def _page(name: str, facts: list[tuple[str, str]], pictures: list[Path]) -> str:
    """One file that stands alone: the pictures are inside."""
    items = "".join(f"<div><dt>{html.escape(k)}</dt><dd>{html.escape(v)}</dd></div>" for k, v in facts)
    images = "\n".join(
        f'<img alt="{path.stem}" src="data:image/png;base64,{base64.b64encode(path.read_bytes()).decode()}">'
        for path in pictures
    )
    title = html.escape(name)
    head = f'<meta charset="utf-8"><meta name="viewport" content="width=device-width"><title>{title}</title>'
    return (
        f"<!doctype html>\n<html lang=en><head>{head}<style>{_STYLE}</style></head>\n"
        f"<body><h1>{title}</h1><dl>{items}</dl>\n{images}\n</body></html>\n"
    )
