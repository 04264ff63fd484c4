"""Moves samples from one worker to another: what balancing and cuts have in common.

    order ─Revoke─▶ source: ends them between two decode steps ─▶ reports them as ABORTED after their last tokens
                    ledger: queued again, with their tokens ─▶ policies.assign chooses the next worker

Invariants
- No token is generated twice: the ledger takes a sample back when its worker has reported its last token, and another
  worker goes on after that token, with one prefill. A sample that ends before that is simply finished.
- No sample is ordered twice: one that is on its way counts at the target, not at the source, and is not picked again.
- Samples move only between workers that serve the newest version, load no other, and hold no suspect.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from actors.fleet.scope import JobScope
from actors.fleet.workers import Worker
from actors.protocol.work import Revoke
from transport.transport import SendOutcome


@dataclass(frozen=True, slots=True)
class _OnItsWay:
    """An order has told the source to end samples, so that the target can go on with them."""

    source: str
    target: str
    numbers: np.ndarray  # int64[n] assignments at the source


class Moves:
    """The moves take samples from workers to give them to others, and remember which have not come back yet."""

    def __init__(self, scope: JobScope) -> None:
        self._scope = scope
        self._moves: list[_OnItsWay] = []

    def serving(self, now: float) -> list[Worker]:
        """Workers that may give samples, and take some."""
        suspects = self._scope.ledger.workers_with_suspects()
        there = self._scope.workers.by_name.values()
        newest = max((worker.policy_version for worker in there), default=-1)
        return [
            worker
            for worker in there
            if worker.policy_version == newest >= 0
            and worker.pulling_version < 0
            and worker.may_get_work(now)
            and worker.name not in suspects
        ]

    def forget_what_has_left(self) -> None:
        ledger = self._scope.ledger
        there = ((move, ledger.live(move.source, move.numbers)) for move in self._moves)
        self._moves = [_OnItsWay(move.source, move.target, left) for move, left in there if len(left)]

    def held(self) -> dict[str, int]:
        """Worker → number of samples that it has, as if those on their way had arrived."""
        held = {worker.name: worker.in_flight for worker in self._scope.workers.by_name.values()}
        for move in self._moves:
            held[move.source] = held.get(move.source, 0) - len(move.numbers)
            held[move.target] = held.get(move.target, 0) + len(move.numbers)
        return held

    def told(self) -> dict[str, list[np.ndarray]]:
        """Worker → assignments that it has been told to end, and has not ended yet."""
        told: dict[str, list[np.ndarray]] = {}
        for on_its_way in self._moves:
            told.setdefault(on_its_way.source, []).append(on_its_way.numbers)
        return told

    def order(self, source: str, target: str, numbers: np.ndarray) -> bool:
        """Tell the source to end these assignments for the target; False if the order could not be sent."""
        scope, worker = self._scope, self._scope.workers.by_name[source]
        order = Revoke(job=scope.name, term=scope.ledger.term, assignments=numbers)
        sent = scope.tell(worker.address, order) is SendOutcome.QUEUED
        if sent:
            self._moves.append(_OnItsWay(source, target, numbers))
        return sent
