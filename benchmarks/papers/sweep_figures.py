"""The picture of a sweep: a panel for each model and set-up, a line for each policy, its plain baseline at 1.

The band around a line reaches from the lowest draw to the highest. Panels of one baseline stand in rows of their own,
at most three in each, which share their scale.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Final, Literal

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from benchmarks.papers.sweep import Panel, Sweep
from supervisors.cli.plot.figures import INK, WIDTH, dress

_Style = tuple[str, str, Literal["-", "--"]]
_STYLES: Final[tuple[_Style, ...]] = (
    ("#3f74b5", "o", "-"), ("#e08a2e", "s", "-"), ("#4f9d69", "^", "-"), ("#8a5fb0", "D", "-"), ("#7a7a7a", "v", "--"),
    ("#b8a088", "P", "--"),
)  # fmt: skip
_ROW_HEIGHT: Final = 2.9
_COLUMNS: Final = 3


def curves(sweep: Sweep) -> Figure:
    """All panels of ``sweep``."""
    rows = [
        row
        for _, panels in itertools.groupby(sweep.panels, key=lambda panel: panel.over)
        for row in _in_threes(list(panels))
    ]
    figure = Figure(figsize=(WIDTH, 0.5 + _ROW_HEIGHT * len(rows)), dpi=110, layout="constrained")
    grid = figure.subplots(len(rows), max(map(len, rows)), sharey="row", squeeze=False)
    policies = list(dict.fromkeys(policy for panel in sweep.panels for policy in panel.ratios))
    styles = dict(zip(policies, itertools.cycle(_STYLES), strict=False))
    for i, panels in enumerate(rows):
        for j, axes in enumerate(grid[i]):
            if j < len(panels):
                _draw(axes, panels[j], sweep, styles, first=j == 0)
            else:
                axes.set_visible(False)
    labels = [
        Line2D([], [], color=c, marker=m, linestyle=s, label=p.replace("_", " ")) for p, (c, m, s) in styles.items()
    ]
    labels.append(Line2D([], [], color=INK, linewidth=1.0, linestyle=":", label="plain baseline"))
    figure.legend(handles=labels, loc="outside lower center", ncols=len(labels), frameon=False, fontsize=9)
    return figure


def _in_threes(panels: list[Panel]) -> list[list[Panel]]:
    """Rows of panels as even as they go: more in a row would have no room for their titles."""
    rows = -(-len(panels) // _COLUMNS)
    each = -(-len(panels) // rows)
    return [panels[i : i + each] for i in range(0, len(panels), each)]


def _draw(axes: Axes, panel: Panel, sweep: Sweep, styles: Mapping[str, _Style], *, first: bool) -> None:
    places = list(range(len(sweep.points)))
    for policy, ratios in panel.ratios.items():
        colour, marker, line = styles[policy]
        axes.fill_between(places, ratios.min(axis=1), ratios.max(axis=1), color=colour, alpha=0.13, linewidth=0)
        axes.plot(
            places, ratios.mean(axis=1), color=colour, marker=marker, linestyle=line, markersize=4.5, linewidth=1.8
        )
    dress(axes, panel.title, sweep.parameter, f"throughput over\n{panel.over}" if first else "")
    axes.axhline(1.0, color=INK, linewidth=1.0, linestyle=":", zorder=1)
    axes.set_xticks(places, sweep.points)
    axes.set_xlim(-0.25, len(places) - 0.75)
