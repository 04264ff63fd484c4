"""The machines that a clairvoyant has, and what they give over a time."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from supervisors.providers.traces import Trace


@dataclass(frozen=True, slots=True)
class Supply:
    """A supply describes the machines."""

    local: float
    """Engines (or devices) on the machines that train."""
    others_s: Callable[[float, float], float]
    """Function of (begin, end) → engine seconds that the others can give between them."""
    step_s: float
    """Seconds of the optimizer, after a step's last sample."""
    step_engines: float
    """Engines of ``local`` that cannot generate meanwhile: as many as must train at least."""
    staleness: int
    """Number k: step v may be generated with version v - k."""
    switch_s: float = 0.0
    """Seconds in which the training machines change from training to generating or back; counted with k = 0 only. They
    begin as ones that train, and with k = 0 the optimizer holds all of them."""
    pull_s: float = 0.0
    """Seconds until another machine has a version that is released; counted with k = 0 only."""

    @property
    def on_policy(self) -> bool:
        """Nothing of a step can be generated before the end of the one before."""
        return self.staleness == 0

    @property
    def first_s(self) -> float:
        """Seconds from a version's release until the first engine can serve it."""
        if not self.on_policy:
            return 0.0
        return min(self.switch_s, self.pull_s) if self.local else self.pull_s

    def since_release_s(self, release_s: float, begin_s: float, end_s: float) -> float:
        """Engine seconds of the others with a version that was released then."""
        has_s = release_s + self.pull_s if self.on_policy else release_s
        return self.others_s(max(begin_s, has_s), end_s) if end_s > max(begin_s, has_s) else 0.0


def of_trace(trace: Trace, until_serving_s: float) -> Callable[[float, float], float]:
    """``Supply.others_s`` of machines that come and go, one engine each, which serve so long after they came."""
    came: dict[str, float] = {}
    spans: list[tuple[float, float]] = []
    for event in trace.events:
        if event.what == "up":
            came[event.node] = event.at_s + until_serving_s
        elif event.what == "kill":
            spans.append((came.pop(event.node), event.at_s))
    spans += [(from_s, float("inf")) for from_s in came.values()]
    return lambda begin_s, end_s: sum(max(0.0, min(end_s, b) - max(begin_s, a)) for a, b in spans)


def first_instant_s(enough: Callable[[float], bool], begin_s: float, least_s: float, wanted: str) -> float:
    """The first instant from ``begin_s`` + ``least_s`` on; if not true once and for all, one up to which it was not.

    Raises:
        ValueError: it never is; ``wanted`` says what.
    """
    if enough(begin_s + least_s):
        return begin_s + least_s
    lasts_s = max(1.0, least_s)
    for _ in range(60):
        if enough(begin_s + lasts_s):
            break
        lasts_s *= 2
    else:
        raise ValueError(f"no machine ever gives {wanted}")
    low, high = least_s, lasts_s
    for _ in range(50):
        middle = (low + high) / 2
        low, high = (low, middle) if enough(begin_s + middle) else (middle, high)
    return begin_s + low
