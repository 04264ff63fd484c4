"""What comes out of a study that varies one parameter: policies over their plain baseline, point by point.

    study ─▶ Sweep ─ measures() ─▶ claims        "<panel>.<policy>.<point>", and ".least" of all points
               └──── as_map() ──▶ result.json ─▶ headrace plot

A ratio is throughput over that of the baseline on the same samples and machines; several draws give several ratios.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np


@dataclass(frozen=True, slots=True)
class Panel:
    """A panel holds policies that have one baseline."""

    key: str
    title: str
    over: str
    """Baseline, in words."""
    ratios: dict[str, np.ndarray]
    """Ratios of each policy, float64[points, draws]."""


@dataclass(frozen=True, slots=True)
class Sweep:
    """A sweep holds what came out at each value of one parameter (see the module's docstring)."""

    parameter: str
    """Parameter in words, with its unit."""
    points: list[str]
    panels: list[Panel]
    also: dict[str, float] = field(default_factory=dict[str, float])
    """Measures besides the points."""

    def measures(self) -> dict[str, float]:
        """Means over the draws."""
        measures = dict(self.also)
        for panel in self.panels:
            for policy, ratios in panel.ratios.items():
                means = ratios.mean(axis=1).tolist()
                at = f"{panel.key}.{policy}"
                measures |= {f"{at}.{point}": mean for point, mean in zip(self.points, means, strict=True)}
                measures[f"{at}.least"] = min(means)
        return measures

    def as_map(self) -> dict[str, Any]:
        """The map that ``result.json`` has."""
        panels = [
            {
                "key": panel.key,
                "title": panel.title,
                "over": panel.over,
                "ratios": {policy: ratios.tolist() for policy, ratios in panel.ratios.items()},
            }
            for panel in self.panels
        ]
        return {"parameter": self.parameter, "points": self.points, "panels": panels}


def sweep_from(values: dict[str, Any]) -> Sweep:
    """The sweep of which that is the map.

    Raises:
        KeyError, TypeError, ValueError: it is none.
    """
    panels = [
        Panel(
            str(panel["key"]),
            str(panel["title"]),
            str(panel["over"]),
            {str(name): np.array(ratios, np.float64) for name, ratios in panel["ratios"].items()},
        )
        for panel in values["panels"]
    ]
    return Sweep(str(values["parameter"]), [str(point) for point in values["points"]], panels)
