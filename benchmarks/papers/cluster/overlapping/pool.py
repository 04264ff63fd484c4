"""Engines and the machines under them: such as stay, such as come and go by a trace, and such as also train.

    publish ─▶ others pull, one load each ─▶ serve the version
    a step's price ─▶ policies.worth_having ─▶ machines are given back, or those offered are taken
    those that train: generate ─change over─▶ train ─change over─▶ generate, with the newest version at once

Invariants
- They generate or train or change over, one at a time. An engine never goes back to an older version.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from actors.policies.seeding import worth_having
from benchmarks.papers.cluster.moving_engine import MovingEngine, Sample
from benchmarks.papers.cluster.overlapping.settings import NEVER_S, Machines
from supervisors.providers.traces import TraceEvent


@dataclass(slots=True, eq=False)
class Engine:
    """An engine serves one version, and may be pulling the next."""

    engine: MovingEngine
    local: bool
    version: int
    coming: int = -1
    """Version that it pulls; -1: none."""
    ready_s: float = 0.0
    """Instant at which it serves that."""
    next_s: float = NEVER_S
    booked: dict[int, float] = field(default_factory=dict[int, float])
    """Samples that it holds → cache that is counted for each: what it has, and a part of what it still needs."""

    def has_room(self, sample: Sample, tokens: float) -> bool:
        """Whether it would begin at once, and is not likely to be put off again because the cache is full."""
        if not self.engine.has_room(sample):
            return False
        return not self.booked or sum(self.booked.values()) + tokens <= self.engine.instance.kv_tokens


class Pool:
    """A pool holds all engines, and the machines that come and go."""

    def __init__(self, machines: Machines, events: Iterable[TraceEvent]) -> None:
        self._m, self._events = machines, deque(events)
        self.fixed = [Engine(MovingEngine(f"fixed-{i}", machines.instance), False, 0) for i in range(machines.fixed)]
        self.local = [Engine(MovingEngine(f"local-{i}", machines.instance), True, 0) for i in range(machines.local)]
        self.generating = bool(machines.local)
        """Whether the machines that train generate, if they have engines."""
        self.since_s = machines.start_s
        """Instant from which they do what they are to do; until then they change over."""
        self.spot: dict[str, Engine] = {}
        self._offered: dict[str, None] = {}
        """Machines that are there and not taken."""
        self.most: int | None = None
        """Machines of them that are taken at most; None: all that there are."""
        self._decided: deque[int] = deque(maxlen=worth_having.STEPS)
        """Machines that each of the last steps would have had, if price decides."""
        self._gone_busy_s = 0.0

    def others(self) -> list[Engine]:
        """Engines on machines that do not train."""
        return [*self.fixed, *self.spot.values()]

    def awake(self, now_s: float) -> list[Engine]:
        """Those that could generate now."""
        return [*self.local, *self.others()] if self.generating and self.since_s <= now_s else self.others()

    def can_train(self, now_s: float) -> bool:
        """Whether the machines that train neither generate nor change over."""
        return not self.generating and self.since_s <= now_s

    def next_s(self, now_s: float) -> float:
        """When anything is due here."""
        later = [self.since_s] if self.since_s > now_s else []
        later += [e.ready_s for e in self.others() if e.coming >= 0]
        later += [e.next_s for e in self.awake(now_s)]
        if self._events:
            later.append(self._events[0].at_s)
        return min(later, default=NEVER_S)

    def busy_s(self) -> float:
        """Engine seconds in which samples ran, from the beginning."""
        return self.others_busy_s() + sum(e.engine.busy_s for e in self.local)

    def others_busy_s(self) -> float:
        """The same of the machines that do not train."""
        return self._gone_busy_s + sum(e.engine.busy_s for e in self.others())

    # ------------------------------------------------------------ versions

    def publish(self, version: int, now_s: float) -> None:
        """Machines that train have it; the others begin to pull."""
        for one in self.local:
            one.version = version
        others = self.others()
        pull_s = self._m.pull_s(len(others)) if others else 0.0
        for one in others:
            booting_s = max(0.0, one.ready_s - now_s) if one.version < 0 else 0.0
            one.coming, one.ready_s = version, now_s + max(pull_s, booting_s)

    def loaded(self, now_s: float) -> list[Engine]:
        """Engines that have what they pulled."""
        return [e for e in self.others() if e.coming >= 0 and e.ready_s <= now_s + 1e-9]

    # ------------------------------------------------------------ those that come and go

    def weigh(self, cost: worth_having.StepCost, lost: Callable[[Engine], None]) -> None:
        """After a step that has cost this: machines that are not worth their price go, those with least to do first.

        Of such as have nothing to do, those that serve last.
        """
        self._decided.append(worth_having.decide(cost, cost.useful()))
        self.most = worth_having.settled(self._decided)
        if self.most is None:
            return
        by_work = sorted(self.spot, key=lambda node: (len(self.spot[node].engine.running), -self.spot[node].ready_s))
        for node in by_work[: max(0, len(by_work) - self.most)]:
            self._remove(node, lost)
            self._offered[node] = None

    def place(self, count: int) -> None:
        """So many are there from the beginning, and serve the first version."""
        for i in range(count):
            node = f"placed-{i}"
            self.spot[node] = Engine(MovingEngine(node, self._m.instance), False, 0)

    def expect(self, events: Iterable[TraceEvent]) -> None:
        """More of the trace, in order and later than what it has said so far."""
        self._events.extend(events)

    def follow_trace(self, now_s: float, version: int, lost: Callable[[Engine], None]) -> None:
        """What the trace says of the time up to now."""
        while self._events and self._events[0].at_s <= now_s + 1e-9:
            event = self._events.popleft()
            if event.what == "up":
                self._offered[event.node] = None
            elif event.what == "kill":
                self._offered.pop(event.node, None)
                if event.node in self.spot:
                    self._remove(event.node, lost)
        free = len(self._offered) if self.most is None else max(0, self.most - len(self.spot))
        for node in list(self._offered)[:free]:
            del self._offered[node]
            self.spot[node] = one = Engine(MovingEngine(node, self._m.instance, now_s=now_s), False, -1)
            one.coming = version
            one.ready_s = now_s + self._m.boot_s + self._m.pull_s(1)

    def _remove(self, node: str, lost: Callable[[Engine], None]) -> None:
        gone = self.spot.pop(node)
        lost(gone)
        self._gone_busy_s += gone.engine.busy_s
