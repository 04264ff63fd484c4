"""The learning rules by name. One file a rule; each is two pure functions.

rewards float64[g] ──advantages──▶ float64[g]      one group
BatchShape ──normaliser──▶ float                   one step: what the summed token losses are divided by
"""

from __future__ import annotations

from actors.trainer.algorithms import dr_grpo, grpo, ppo, rloo
from actors.trainer.algorithms.rule import Algorithm, BatchShape

ALGORITHMS: dict[str, Algorithm] = {rule.name: rule for rule in (grpo.GRPO, dr_grpo.DR_GRPO, rloo.RLOO, ppo.PPO)}

__all__ = ["ALGORITHMS", "Algorithm", "BatchShape", "algorithm_named"]


def algorithm_named(name: str) -> Algorithm:
    """The rule called ``name``. Raises KeyError with the known names; the schema allows no other."""
    if name not in ALGORITHMS:
        raise KeyError(f"algorithm.name: {name!r}, expected one of {sorted(ALGORITHMS)}")
    return ALGORITHMS[name]
