"""Samples on their way from one worker to another: what balancing and cuts have in common.

    order ─Revoke─▶ source: ends them between two steps ─▶ ABORTED rows, behind their last tokens
                    ledger: queued, with their tokens ─▶ policies.assign: to whom they go

Invariants
- Nothing is generated twice: a sample is taken back in the ledger when its worker has said its last token of it, and
  goes on elsewhere behind that token, after one prefill. One that ends meanwhile has ended.
- Nothing is ordered twice: what is on its way counts at the target and no longer at the source, and is not picked.
- Only between workers that serve the newest version and load no other, and hold no suspect.
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
    """One has the source end samples so that the target can go on with them."""

    source: str
    target: str
    numbers: np.ndarray  # int64[n] assignments at the source


class Moves:
    """It takes samples from workers for the sake of others, and knows which have not come back yet."""

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
        """Worker → samples that it has, as if what is on its way had arrived."""
        held = {worker.name: worker.in_flight for worker in self._scope.workers.by_name.values()}
        for move in self._moves:
            held[move.source] = held.get(move.source, 0) - len(move.numbers)
            held[move.target] = held.get(move.target, 0) + len(move.numbers)
        return held

    def told(self) -> dict[str, list[np.ndarray]]:
        """Worker → what it has been told to end, and has not."""
        told: dict[str, list[np.ndarray]] = {}
        for on_its_way in self._moves:
            told.setdefault(on_its_way.source, []).append(on_its_way.numbers)
        return told

    def order(self, source: str, target: str, numbers: np.ndarray) -> bool:
        """Have the source end these; False if it could not be told."""
        scope, worker = self._scope, self._scope.workers.by_name[source]
        order = Revoke(job=scope.name, term=scope.ledger.term, assignments=numbers)
        sent = scope.tell(worker.address, order) is SendOutcome.QUEUED
        if sent:
            self._moves.append(_OnItsWay(source, target, numbers))
        return sent
