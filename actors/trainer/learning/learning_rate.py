"""The learning rate of each step: a rise, then constant, linear or cosine decay over the job's steps. Pure.

    1 ┤     ╭───────────── constant
      │   ╱ ╲ ╲
      │ ╱     ╲   ╲   linear, cosine
    0 ┼───────────────╲▶ step
        warmup        total

The rise is that of transformers one step earlier, the decay exactly that (``get_linear_schedule_with_warmup``,
``get_cosine_schedule_with_warmup``): so neither the first step nor the last one has a rate of 0.
"""

from __future__ import annotations

import math

from configs.schema import LrSchedule


def learning_rate(step: int, *, peak: float, schedule: LrSchedule, warmup_steps: int, total_steps: int) -> float:
    """Rate of the optimizer step number ``step``, from 0; steps beyond ``total_steps`` have that of the last one."""
    if step < warmup_steps:
        return peak * (step + 1) / warmup_steps
    if schedule == "constant":
        return peak
    past = min(step, total_steps - 1) - warmup_steps
    progress = max(0, past) / max(1, total_steps - warmup_steps)
    return peak * (1.0 - progress if schedule == "linear" else 0.5 * (1.0 + math.cos(math.pi * progress)))
