"""Checks that engines load each version of a job's weights bit for bit as the trainer published it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final

Tensors = Mapping[str, bytes]
EXACT_MODES: Final = ("sync", "minibatch")
"""Modes in which equal jobs reach equal weights, whatever faults hit them."""


class PublishedWeights:
    """Keeps the published weights of one job. ``finding`` is told of violations.

    Args:
        repeats_exactly: whether a trainer that replays must publish the same version again, as in ``EXACT_MODES``,
            where prompts are trained in order.
    """

    def __init__(self, finding: Callable[[str], None], *, repeats_exactly: bool) -> None:
        self._finding = finding
        self._repeats_exactly = repeats_exactly
        self._versions: dict[int, list[Tensors]] = {}
        self._states: dict[int, bytes] = {}

    def reached(self, step: int, state: bytes) -> None:
        """Note that a trainer has reached ``step``, by training or loading. ``state``: its weights and optimizer."""
        if self._repeats_exactly and self._states.setdefault(step, state) != state:
            self._finding(f"weights: after {step} steps a trainer has another state than one before it had")

    def add(self, version: int, tensors: Tensors) -> None:
        """Note that a trainer has published ``version``."""
        known = self._versions.setdefault(version, [])
        if known and self._repeats_exactly and tensors not in known:
            self._finding(f"weights: version {version} was laid out twice, with different numbers")
        known.append(tensors)

    def check(self, version: int, tensors: Tensors) -> None:
        """Note that an engine is about to serve ``version``."""
        if tensors not in self._versions.get(version, []):
            self._finding(f"weights: an engine was given version {version} with numbers that no trainer laid out")

    @property
    def final(self) -> Tensors:
        """Tensors of the newest version; empty before the first."""
        return self._versions[max(self._versions)][-1] if self._versions else {}
