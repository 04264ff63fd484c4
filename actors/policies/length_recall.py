"""How good a length ranking is: of the longest x % of the samples, how many were predicted to be among them.

StreamRL Table 4 reports this recall for 20, 10 and 5 %. A ranking by chance has a recall of x. Ties are settled by
chance, and what is returned is the mean over that chance: samples whose predictions are all equal come out at x.
"""

from __future__ import annotations

import numpy as np


def recall_of_longest(predicted: np.ndarray, actual: np.ndarray, fraction: float) -> float:
    """Recall of the longest ``fraction`` of ``actual``, float[n] each, n ≥ 1; at least one sample counts as longest."""
    k = max(1, round(fraction * len(actual)))
    return float((_membership(predicted, k) * _membership(actual, k)).sum() / k)


def _membership(values: np.ndarray, k: int) -> np.ndarray:
    """float64[n] chance of each to be among the ``k`` largest, if equal ones are drawn from by lot."""
    border = np.partition(values, len(values) - k)[len(values) - k]
    above, level = values > border, values == border
    share = (k - int(above.sum())) / int(level.sum())
    return above + share * level
