"""A residency over simulated backends, whose bundles are so small that a few KiB are a full machine."""

from __future__ import annotations

import mmap
from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import ClassVar, ParamSpec, TypeVar

from actors.train_service.residency import Residency, ResidencyRules
from actors.trainer.backend import BackendSpec, LossSpec, MicroBatch
from actors.trainer.backends.simulated_backend import SimulatedBackend
from actors.trainer.parking import Parkable, Place
from tests.contracts.test_train_backend_contract import samples, whole

P = ParamSpec("P")
R = TypeVar("R")

PAGE = mmap.PAGESIZE
COPY = PAGE
"""What the stored copy of a bundle takes after a step: one part, a page."""
RESIDENT = 8 + 4 * (32 * 4 + 4 + 12) * 4
"""What a bundle takes in the budget: weights and momentum in float32, sums in float64, of 144 numbers."""


async def run_blocking(function: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
    """At once, as on a virtual-time loop."""
    return function(*args, **kwargs)


def clock() -> Callable[[], float]:
    """A clock that moves on by a second each time somebody looks."""
    ticks = count()
    return lambda: float(next(ticks))


def batch(seed: int) -> MicroBatch:
    return whole(samples(seed=seed))[0]


class World:
    """One service's residency, through several lives."""

    lives: ClassVar[list[Residency]] = []
    """Lives of all worlds; ``end`` lets go of what they have open."""

    def __init__(self, directory: Path, **rules: int) -> None:
        self.directory = directory
        sizes = {"budget_bytes": 2 * RESIDENT, "host_bytes": 100 * PAGE, "disk_bytes": 100 * PAGE}
        self.rules = ResidencyRules(**{**sizes, **rules})  # type: ignore[arg-type]
        self.now = clock()
        self.backends: dict[str, SimulatedBackend] = {}
        self.residency = self._new()

    def _new(self) -> Residency:
        self.lives.append(Residency(self.rules, self.directory, now=self.now, run_blocking=run_blocking))
        return self.lives[-1]

    @classmethod
    def end(cls) -> None:
        while cls.lives:
            cls.lives.pop()._stored._files.close()

    async def killed_and_started(self) -> None:
        """The process dies without a word, and the next life opens what it left."""
        self.residency._stored._files.close()  # the system does that
        self.backends.clear()
        self.residency = self._new()
        await self.residency.open()

    async def backend(self) -> SimulatedBackend:
        backend = SimulatedBackend()
        await backend.start(BackendSpec(model_path=Path(), learning_rate=0.01))
        return backend

    async def add(self, *jobs: str) -> None:
        for job in jobs:
            backend = await self.backend()
            await self.residency.add(job, backend)
            self.backends[job] = backend

    async def train(self, job: str, seed: int = 0) -> None:
        """A burst of ``job``."""
        await self.residency.make_resident(job)
        await self.backends[job].accumulate(batch(seed), LossSpec())
        await self.backends[job].step(weight=10.0)

    def tier(self, job: str) -> str:
        return next(bundle.tier for bundle in self.residency.report().bundles if bundle.job == job)


async def bits(backend: Parkable) -> bytes:
    """All of a resident backend's state."""
    found = b""
    for part in backend.parts():
        place = memoryview(bytearray(part.size_bytes))
        await backend.copy_out({part.name: Place(place, Path("in memory alone"))}, 1 << 20)
        found += bytes(place)
    return found
