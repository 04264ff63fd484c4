"""StreamRL's studies, typed: workload, hardware and models of the published experiments, and what is varied in each.

Defaults are the paper's set-up (arXiv 2504.15930, section 7) where it is published; what is not is a calibration, and
its docstring says from which published number it was taken. ``docs/papers/streamrl.md`` tells the whole of it.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from configs.schema import PositiveFloat, PositiveInt, Section

Fraction = Annotated[float, Field(ge=0, le=1)]


class LengthHistogram(Section):
    """Output lengths: bins of equal width, uniform within a bin."""

    first_tokens: PositiveInt = 800
    """Where the first bin begins."""
    bin_tokens: PositiveInt = 640
    """Width of a bin."""
    weights: tuple[Annotated[float, Field(ge=0)], ...] = (
        19.7, 26.6, 19.1, 18.3, 12.2, 9.8, 8.4, 4.9, 5.3, 3.4, 2.5, 3.6, 2.5, 0.8, 1.2,
        0.7, 1.1, 0.5, 2.0, 1.3, 1.3, 3.1, 1.0, 1.2, 1.3, 1.7, 1.3, 1.7, 1.0, 1.4,
    )  # fmt: skip
    """One a bin, in any unit; the default is the paper's Fig. 7, read off to about 2 %."""
    scale: PositiveFloat = 1.0
    """Every length times this; the 10K and 5K variants are 0.5 and 0.25."""


class Ranker(Section):
    """A length predictor that sees true lengths through noise: estimate = length · exp(sigma · N(0, 1))."""

    sigma: Annotated[float, Field(ge=0)] = 0.27
    """0 is an oracle. The default recalls 87 % of the longest 20 %, as the 7B ranker of Tab. 4."""


class LengthsStudy(Section):
    """Statistics of the length histogram."""

    kind: Literal["streamrl_lengths"]
    lengths: LengthHistogram = LengthHistogram()
    samples: PositiveInt = 200_000
    """How many are drawn."""


class RankerStudy(Section):
    """How much of the true longest the emulated ranker finds."""

    kind: Literal["streamrl_ranker"]
    lengths: LengthHistogram = LengthHistogram()
    ranker: Ranker = Ranker()
    samples: PositiveInt = 100_000
    """How many are ranked."""
