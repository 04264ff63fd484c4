"""Numbers that user code has returned, checked: rewards and metrics."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, cast

from actors.environments.episodes.errors import EnvironmentBroken
from actors.environments.scoring.user_code import as_number
from configs.limits import DEFAULT_LIMITS


def as_reward(value: Any, whose: str) -> float:
    """A finite number.

    Raises:
        EnvironmentBroken: it is infinite or none.
        ScorerBroken: it is no number.
    """
    number = as_number(value, whose)
    if not math.isfinite(number):
        raise EnvironmentBroken(f"{whose} gave the reward {number}; expected a finite number")
    return number


def as_metrics(value: Any, whose: str) -> dict[str, float]:
    """Numbers by name. Raises as ``as_reward``, and where it is no map of them or too many."""
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise EnvironmentBroken(f"{whose} gave a {type(value).__name__}; expected numbers by name")
    told = cast("Mapping[Any, Any]", value)
    if len(told) > DEFAULT_LIMITS.episode_metrics:
        raise EnvironmentBroken(f"{whose} gave {len(told)} numbers; expected at most {DEFAULT_LIMITS.episode_metrics}")
    return {str(name): as_reward(number, f"{whose} {name!r}") for name, number in told.items()}
