"""The book of a job's functions: which there are, since when, and what has been billed for all that ever were.

The head sends the book as one text to the machine process, which starts and ends machines by it and hands it to the
head's next life. Both read the same clock, that of the machine. ``actors/policies/planning/bill.py`` says how a
function is billed.
"""

from __future__ import annotations

from typing import Final, Literal

import msgspec

from actors.policies.planning import bill
from configs.provider_schema import ProviderConfig

State = Literal["starting", "awake", "asleep"]
KIND: Final = "function"
"""Kind of the nodes: a key of ``cluster.prices``."""


class Function(msgspec.Struct):
    """One function that is not cold: a machine with one worker, or one that is being started."""

    node: str
    ordered_s: float
    since_s: float
    """Time at which it came into its state."""
    counted_s: float
    """Time at which the three sums were brought up to date."""
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

    def count(self, now: float) -> None:
        """Bring the sums up to date."""
        spent_s, self.counted_s = now - self.counted_s, now
        self.asleep_s += spent_s if self.state == "asleep" else 0.0
        self.works_s += spent_s if self.works else 0.0
        self.starting_s += spent_s if self.state == "starting" else 0.0

    def enter(self, state: State, now: float, *, works: bool = False) -> None:
        self.count(now)
        if state != self.state:
            self.state, self.since_s = state, now
        self.works = works

    def span(self, now: float) -> bill.BilledLife:
        """The function's life up to now, for the bill."""
        self.count(now)
        return bill.BilledLife(self.ordered_s, now, self.asleep_s, self.works_s)


class Totals(msgspec.Struct, frozen=True):
    """Sums over all functions that ever were."""

    billed_s: float = 0.0
    works_s: float = 0.0
    starting_s: float = 0.0


class FunctionBook(msgspec.Struct):
    """The functions of one job that are there, and the sums of those that are gone."""

    there: list[Function] = msgspec.field(default_factory=list[Function])
    begun: int = 0
    """Number of functions that were ever ordered."""
    ended: Totals = Totals()
    """Totals of those that are gone."""
    told: Totals = Totals()
    """Totals as they stand in the rows of steps so far."""
    told_begun: int = 0
    prefix: str = ""
    """Beginning of every function's name."""

    def encode(self) -> str:
        return msgspec.json.encode(self).decode()

    @staticmethod
    def decode(text: str) -> FunctionBook:
        """The book from its text, as an earlier head wrote it; this head has seen none of its machines yet."""
        book = msgspec.json.decode(text, type=FunctionBook)
        for function in book.there:
            function.joined = False
        return book

    def of_worker(self, worker: str) -> Function | None:
        return next((function for function in self.there if function.worker == worker), None)

    def begin(self, now: float) -> Function:
        """Add a new function, under a name that was never used."""
        function = Function(f"{self.prefix}f{self.begun}", now, now, now)
        self.begun += 1
        self.there.append(function)
        return function

    def end(self, function: Function, now: float, rule: ProviderConfig) -> float:
        """Take ``function`` out; returns the worker-seconds for which it is billed."""
        self.there.remove(function)
        span = function.span(now)
        billed_s = bill.bill([span], bill.BillingRule(rule.bill_rounding_s, rule.asleep_price))
        self.ended = self._with(self.ended, billed_s, function)
        return billed_s

    def take(self, now: float, rule: ProviderConfig) -> dict[str, float]:
        """What was billed since the last call, as columns of a step's row.

        A function that is there is billed up to now; its last second is rounded up once it is gone.
        """
        totals, to_now = self.ended, bill.BillingRule(0.0, rule.asleep_price)
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
    """Names of the machines of the functions in the text of a book."""
    return [function.node for function in FunctionBook.decode(book).there]
