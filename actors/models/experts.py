"""Experts as transformers keeps them: one module a layer, whose parameters are each a weight of all experts."""

from __future__ import annotations

from typing import Any


def are_experts(part: Any) -> bool:
    """Whether a module is all experts of a layer, as transformers makes them of every family that it can compute by
    grouped products.
    """
    return hasattr(part, "_is_expert_parallel") and hasattr(part, "num_experts")
