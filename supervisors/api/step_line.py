"""A row of metrics.jsonl as one line for people: in the terminal, in ``print(event)``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def step_line(row: Mapping[str, Any], steps: int | None) -> str:
    """One step as a plain line, by its number, which counts from 0; ``–`` stands for the mean of no sample.

    ``step`` of ``row`` counts the steps that are done, as in progress maps.
    """
    done = int(row["step"])
    of = f" ({done} of {steps})" if steps else ""
    lost = int(row.get("samples_dropped") or 0)
    dropped = f"dropped {lost} of {lost + int(row.get('samples') or 0)}  " if lost else ""
    reward = figure(row, "reward_mean", ".3f")
    return (
        f"step {done - 1}{of}  reward {reward}  {dropped}{tokens_per_second(row):,.0f} tokens/s  "
        f"staleness {figure(row, 'staleness_max', '.0f')}  "
        f"idle rollout {float(row.get('rollout_idle_fraction', 0)):.0%} "
        f"trainer {float(row.get('trainer_idle_fraction', 0)):.0%}  {float(row.get('seconds', 0)):.2f} s"
    )


def figure(row: Mapping[str, Any], name: str, form: str) -> str:
    """A column's number; ``–`` where the row has none, as it is a mean of nothing."""
    value = row.get(name)
    return format(float(value), form) if value is not None else "–"


def tokens_per_second(row: Mapping[str, Any]) -> float:
    """Generated tokens per second of the step; 0 where the step took no time."""
    seconds = float(row.get("seconds", 0))
    return float(row.get("tokens_generated", 0)) / seconds if seconds > 0 else 0.0
