"""GRPO: rewards normalised within the group, loss averaged over all tokens of the step.

The average over *all* tokens, not first within each response, is the token-level loss of DAPO (Yu et al. 2025,
section 3.3): a token of a long response weighs as much as one of a short response.
"""

from __future__ import annotations

from actors.trainer.advantages import group_normalised
from actors.trainer.algorithms.rule import Algorithm, BatchShape


def tokens_of_step(shape: BatchShape) -> float:
    """How many response tokens the step has."""
    return float(max(1, shape.response_tokens))


GRPO = Algorithm(name="grpo", advantages=group_normalised, normaliser=tokens_of_step)
