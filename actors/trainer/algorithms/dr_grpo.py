"""Dr. GRPO: no division by the group's spread, and a constant length in place of the response's own.

Source: Liu et al. 2025 (Understanding R1-Zero-like training), section 3.2: both divisions bias GRPO, the one
towards questions of small spread, the other towards long wrong answers.
"""

from __future__ import annotations

from actors.trainer.advantages import centred
from actors.trainer.algorithms.rule import Algorithm, BatchShape


def constant_length(shape: BatchShape) -> float:
    """Samples times the response limit: the same for every step of a job that loses no sample."""
    return float(max(1, shape.samples * shape.max_response_tokens))


DR_GRPO = Algorithm(name="dr_grpo", advantages=centred, normaliser=constant_length)
