"""Lengths by siblings: a sample will be about as long as the rest of its group (StreamRL 1.5, cheap substitute a).

    expected = (tokens of the finished + tokens so far of the running) / number finished

the maximum-likelihood mean of a group whose running members are only known to be longer than they are now. While none
has finished, what the longest has reached is a lower bound and not yet an estimate: the prompt stays unknown until
that bound exceeds what the others are expected to reach.

To learn anything while there is still something to order, one sample of each group goes first (``probes``): the queue
is then a sweep of probes, followed by the rest of the groups, longest first. Costs one more prefill of the prompt where
the rest of the group goes to another worker.
"""

from __future__ import annotations

import numpy as np

from actors.policies.length_predictor import PromptsView


class LengthOfSiblings:
    """It keeps nothing: all that it knows stands in the view."""

    probes = 1

    def expected(self, view: PromptsView) -> np.ndarray:
        finished = view.finished.sum(axis=1)
        tokens = view.lengths.sum(axis=1)
        known = finished > 0
        expected = np.where(known, tokens / np.maximum(finished, 1), np.nan)
        reached = view.lengths.max(axis=1, initial=0)
        others = float(np.median(expected[known])) if known.any() else np.inf
        return np.where(~known & (reached > others), reached, expected)

    def observe(self, view: PromptsView) -> None:
        """Nothing outlives the group."""
