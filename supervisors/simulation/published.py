"""What each version of a job's weights is: laid out by the trainer, and loaded by engines bit for bit."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final

Tensors = Mapping[str, bytes]
EXACT_MODES: Final = ("sync", "minibatch")
"""Modes in which equal jobs come to equal weights, whatever happens to them."""


class PublishedWeights:
    """This keeps the published weights of one job. ``finding`` is told of what must not be.

    Args:
        repeats_exactly: a version that is laid out again, by a trainer that replays, must be the same: so it is in
            sync mode, where prompts are trained in order.
    """

    def __init__(self, finding: Callable[[str], None], *, repeats_exactly: bool) -> None:
        self._finding = finding
        self._repeats_exactly = repeats_exactly
        self._versions: dict[int, list[Tensors]] = {}
        self._states: dict[int, bytes] = {}

    def reached(self, step: int, state: bytes) -> None:
        """A trainer has come to ``step``, by training or by loading: ``state`` is its weights and its optimizer."""
        if self._repeats_exactly and self._states.setdefault(step, state) != state:
            self._finding(f"weights: after {step} steps a trainer has another state than one before it had")

    def add(self, version: int, tensors: Tensors) -> None:
        """A trainer has laid out ``version``."""
        known = self._versions.setdefault(version, [])
        if known and self._repeats_exactly and tensors not in known:
            self._finding(f"weights: version {version} was laid out twice, with different numbers")
        known.append(tensors)

    def check(self, version: int, tensors: Tensors) -> None:
        """An engine is about to serve ``version``."""
        if tensors not in self._versions.get(version, []):
            self._finding(f"weights: an engine was given version {version} with numbers that no trainer laid out")

    @property
    def final(self) -> Tensors:
        """The newest version; empty before the first."""
        return self._versions[max(self._versions)][-1] if self._versions else {}
