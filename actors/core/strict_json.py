"""JSON that every parser reads: a number that is not finite becomes null, since JSON has no NaN and no Infinity."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any, cast


def strict_json(value: Any, **options: Any) -> str:
    """``value`` as JSON; ``options`` are those of ``json.dumps``."""
    try:
        return json.dumps(value, allow_nan=False, **options)
    except ValueError:
        return json.dumps(_finite(value), allow_nan=False, **options)


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: _finite(one) for key, one in cast("Mapping[Any, Any]", value).items()}
    if isinstance(value, list | tuple):
        return [_finite(one) for one in cast("list[Any]", value)]
    return value
