"""What tenants use: told of each operation as an event, and of each tenant on request.

    operation ended ─▶ Spent ─┬─▶ operation log, with the answer ─▶ uses: what each tenant has used, and has now
                              └─▶ Events ─▶ whoever writes events.jsonl: the metrics actor, for one

Invariants
- Accounts are exact, through all deaths. An event is told of after what it tells of is durable: a death between the two
  loses the event.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import Final

from actors.tinker import operations as op
from actors.tinker.operation_log import Spent

Record = Callable[[str, dict[str, float | int | str]], None]
"""Takes an event: its name, and its fields."""

_USED: Final = ("operations", "training_tokens", "sampled_tokens", "compute_s", "wait_s")
_NOW: Final = ("sessions", "models", "models_awake", "samplers", "waiting_operations", "waiting_samples", "disk_bytes")


class Events:
    """Tells of operations that have ended, and of what becomes of models."""

    def __init__(self, record: Record) -> None:
        self._record = record
        self.keys_refused = 0

    def event(self, name: str, **fields: float | str) -> None:
        self._record(name, fields)

    def operation(self, kind: str, seq: int, answer: op.Answer, spent: Spent) -> None:
        """Tell of an operation that has its answer, or of a sample."""
        outcome = "done" if not isinstance(answer, op.Failed) else "refused" if answer.of_user else "failed"
        tokens = spent.training_tokens + spent.sampled_tokens
        self.event(
            "operation", tenant=spent.tenant, model=spent.model, seq=seq, kind=kind, tokens=tokens,
            wait_s=round(spent.wait_s, 6), compute_s=round(spent.compute_s, 6), outcome=outcome,
        )  # fmt: skip

    def refused(self, why: str) -> None:
        """Tell of a request with a bad key: of the first, and whenever their number has doubled."""
        self.keys_refused += 1
        if self.keys_refused & (self.keys_refused - 1) == 0:
            self.event("key_refused", count=self.keys_refused, why=why)


class Stopwatch:
    """Measures an operation that could begin when this is made."""

    def __init__(self) -> None:
        self._could_s = self._began_s = asyncio.get_running_loop().time()

    def begins(self) -> None:
        self._began_s = asyncio.get_running_loop().time()

    def spent(self, tenant: str, model: str, answer: op.Answer, training_tokens: int = 0) -> Spent:
        """What an operation has used that ends now; one that has failed has trained on no tokens."""
        return Spent(
            tenant, model, 1, 0 if isinstance(answer, op.Failed) else training_tokens, op.sampled_tokens(answer),
            asyncio.get_running_loop().time() - self._began_s, self._began_s - self._could_s,
        )  # fmt: skip


def uses(in_all: Iterable[Spent], now: Iterable[tuple[str, str, int]]) -> dict[str, dict[str, float]]:
    """By tenant: what it has used ``in_all``, and the sums of what it has ``now``: (tenant, what, how much) each."""
    found = defaultdict[str, dict[str, float]](lambda: dict.fromkeys((*_USED, *_NOW), 0))
    for spent in in_all:
        found[spent.tenant] |= {name: getattr(spent, name) for name in _USED}
    for tenant, what, count in now:
        found[tenant][what] += count
    return dict(found)
