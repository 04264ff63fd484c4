"""One rank's part of a tensor parallel vLLM engine, of the leader and of a follower alike."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from actors.rollout.engines.vllm import ranks
from actors.rollout.engines.vllm.engine import VllmEngine


class RankedEngine(VllmEngine):
    """Is built at its place among the ranks, and agrees with the others on what has gone well."""

    def take_place(self, place: ranks.Place) -> None:
        """Say which rank it is, before it starts."""
        self._place = place

    def meet_at(self, directory: Path) -> None:
        """Say where ranks that have let go of each other meet again."""
        assert self._place is not None, "it has been started"
        self._place = dataclasses.replace(self._place, directory=directory)

    def _all_agree(self, well: bool) -> bool:
        return ranks.all_agree(well)
