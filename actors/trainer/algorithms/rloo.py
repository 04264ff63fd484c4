"""RLOO: REINFORCE with the mean of the other siblings' rewards as baseline; the whole response is one action.

Source: Ahmadian et al. 2024 (Back to basics), sections 2.2 and 3.1. Their KL penalty is part of the reward; here
``algorithm.kl_coefficient`` adds it to the loss as for the other rules.
"""

from __future__ import annotations

from actors.trainer.advantages import leave_one_out
from actors.trainer.algorithms.rule import Algorithm, BatchShape


def samples_of_step(shape: BatchShape) -> float:
    """How many samples the step has: log-probabilities add up within a response and are averaged over responses."""
    return float(max(1, shape.samples))


RLOO = Algorithm(name="rloo", advantages=leave_one_out, normaliser=samples_of_step)
