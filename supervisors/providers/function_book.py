"""The book of a job's functions: which there are, since when, and what has been billed for all that ever were.

It is one text: the head says it to the machine process, which starts and ends machines by it and hands it to the
head's next life. Both read the same clock, that of the machine. What a bill is stands in ``actors/policies/bill.py``.
"""

from __future__ import annotations

from typing import Final, Literal

import msgspec

from actors.policies import bill
from configs.provider_schema import ProviderConfig

State = Literal["starting", "awake", "asleep"]
KIND: Final = "function"
"""Kind of the nodes: a key of ``cluster.prices``."""


class Function(msgspec.Struct):
    """It is one function that is not cold: a machine with one worker, or one that is being started."""

    node: str
    ordered_s: float
    since_s: float
    """Time since which it is in its state."""
    counted_s: float
    """Time up to which the three sums count."""
    state: State = "starting"
    works: bool = False
    """True while it is awake for a step that is being generated."""
    asleep_s: float = 0.0
    works_s: float = 0.0
    starting_s: float = 0.0
    joined: bool = False
    """True once this life of the head has seen its machine."""
    is_new: bool = True
    """True until a plan has used it."""

    @property
    def worker(self) -> str:
        return f"rollout-{self.node}"

    @property
    def is_ready(self) -> bool:
        return self.state != "starting"

    def has_slept(self, now: float) -> float:
        """Seconds; -1 while it does not sleep."""
        return now - self.since_s if self.state == "asleep" else -1.0

    def count(self, now: float) -> None:
        """Bring the sums up to date."""
        spent_s, self.counted_s = now - self.counted_s, now
        self.asleep_s += spent_s if self.state == "asleep" else 0.0
        self.works_s += spent_s if self.works else 0.0
        self.starting_s += spent_s if self.state == "starting" else 0.0

    def turn(self, state: State, now: float, *, works: bool = False) -> None:
        """From now on it is in ``state``."""
        self.count(now)
        if state != self.state:
            self.state, self.since_s = state, now
        self.works = works

    def span(self, now: float) -> bill.Span:
        """Its life up to now."""
        self.count(now)
        return bill.Span(self.ordered_s, now, self.asleep_s, self.works_s)


class Totals(msgspec.Struct, frozen=True):
    """They are sums over all functions that ever were."""

    billed_s: float = 0.0
    works_s: float = 0.0
    starting_s: float = 0.0


class FunctionBook(msgspec.Struct):
    """See the module's docstring."""

    there: list[Function] = msgspec.field(default_factory=list[Function])
    begun: int = 0
    """Number of functions that were ever ordered."""
    ended: Totals = Totals()
    """Totals of those that are gone."""
    told: Totals = Totals()
    """Totals as they stand in the rows of steps so far."""
    told_begun: int = 0

    def encode(self) -> str:
        return msgspec.json.encode(self).decode()

    @staticmethod
    def decode(text: str) -> FunctionBook:
        """The book as the head before this one has said it; whose machines are here is not known yet."""
        book = msgspec.json.decode(text, type=FunctionBook)
        for function in book.there:
            function.joined = False
        return book

    def of_worker(self, worker: str) -> Function | None:
        return next((function for function in self.there if function.worker == worker), None)

    def begin(self, now: float) -> Function:
        """A new one, under a name that was never used."""
        function = Function(f"f{self.begun}", now, now, now)
        self.begun += 1
        self.there.append(function)
        return function

    def end(self, function: Function, now: float, rule: ProviderConfig) -> float:
        """It is gone from now on; returns the worker-seconds for which it is billed."""
        self.there.remove(function)
        span = function.span(now)
        billed_s = bill.bill([span], bill.Rule(rule.bill_rounding_s, rule.asleep_price))
        self.ended = self._with(self.ended, billed_s, function)
        return billed_s

    def take(self, now: float, rule: ProviderConfig) -> dict[str, float]:
        """What has come to the bill since the last time, as columns of a row.

        A function that is there is billed up to now; its last second is rounded up once it is gone.
        """
        totals, to_now = self.ended, bill.Rule(0.0, rule.asleep_price)
        for function in self.there:
            totals = self._with(totals, bill.bill([function.span(now)], to_now), function)
        columns = {
            "billed_worker_s": totals.billed_s - self.told.billed_s,
            "compute_worker_s": totals.works_s - self.told.works_s,
            "functions_started": self.begun - self.told_begun,
            "functions_cold_s": totals.starting_s - self.told.starting_s,
        }
        self.told, self.told_begun = totals, self.begun
        return columns

    @staticmethod
    def _with(totals: Totals, billed_s: float, function: Function) -> Totals:
        return Totals(
            totals.billed_s + billed_s, totals.works_s + function.works_s, totals.starting_s + function.starting_s
        )


def machines_of(book: str) -> list[str]:
    """Names of the machines that the text of a book wants."""
    return [function.node for function in FunctionBook.decode(book).there]
