"""Plain generation: all workers take any queued sample, except workers dedicated to long ones (``long_lanes``)."""

from __future__ import annotations

import numpy as np

from actors.fleet.length_ranking import LengthRanking
from actors.fleet.modes.long_lanes import LongLanes
from actors.fleet.modes.mode import Mode
from actors.fleet.scope import JobScope
from actors.fleet.versions import Versions
from actors.policies.assigning.view import GroupView, WorkerView


class Plain(Mode):
    """Every worker generates whatever is queued, all the time."""

    def __init__(self, scope: JobScope, versions: Versions, ranking: LengthRanking) -> None:
        super().__init__(scope, versions, ranking)
        self._lanes = LongLanes(dedicates=scope.job.rollout.dedicated_workers != "none")

    def mark(self, step: int, groups: list[GroupView], workers: list[WorkerView]) -> list[GroupView]:
        if not groups or not self._ranking.active:
            return groups
        batch = self._scope.ledger.batches[step]
        past, begun = tuple(self._ranking.past), bool(batch.attempts.any())
        return self._lanes.mark(step, groups, workers, batch.prompt_tokens, past, self._held, begun=begun)

    def _held(self) -> dict[str, tuple[int, ...]]:
        """Worker → predicted tokens left of each sample that it holds."""
        ledger, held = self._scope.ledger, dict[str, tuple[int, ...]]()
        for name in self._scope.workers.by_name:
            rows = ledger.located(name, ledger.in_flight(name))
            parts = [self._ranking.left(ledger.batches[step], of_step) for step, of_step in rows.items()]
            held[name] = tuple(np.concatenate(parts).tolist()) if parts else ()
        return held
