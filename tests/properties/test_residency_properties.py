"""Any order of training, storing, parking, prefetching, leaving and being killed, in tiers of any size.

Beside each bundle goes a twin that is never parked. Whatever happens, a resident bundle has its twin's state bit for
bit, a tier has no more than it may, its files are those that it has counted, and a next life finds each job's last
stored state, or that it has none.
"""

from __future__ import annotations

import asyncio
import contextlib
import tempfile
from collections.abc import Iterable
from pathlib import Path

from hypothesis import given, settings
from hypothesis import strategies as st

from actors.train_service.errors import NoRoomToPark
from actors.train_service.residency import ParkedState, remove_parked
from actors.trainer.backend import LossSpec
from actors.trainer.backends.simulated_backend import SimulatedBackend
from actors.trainer.parking import TRAINED, Place
from actors.weights.segments import files_in_memory
from tests.actors.train_service.residency_world import COPY, PAGE, RESIDENT, World, batch, bits

JOBS = ("a", "b", "c")
ACTIONS = (
    "accumulate",
    "step",
    "step",
    "score",
    "store",
    "park",
    "resume",
    "prefetch",
    "relieve",
    "leave",
    "kill",
)
SCHEDULES = st.lists(st.tuples(st.sampled_from(ACTIONS), st.sampled_from(JOBS)), min_size=5, max_size=40)


class Twins:
    """Follows a schedule with one service, and with backends that nobody parks."""

    def __init__(self, directory: Path, budget: int, host: int, disk: int) -> None:
        self.world = World(directory, budget_bytes=budget * RESIDENT, host_bytes=host * COPY, disk_bytes=disk * COPY)
        self.twins: dict[str, SimulatedBackend] = {}
        self.stored: dict[str, bytes] = {}
        """Bits of each job's trained part when it was last stored."""

    async def attach(self, job: str) -> None:
        """As a trainer does: with what is parked, if that is there, else from its checkpoint, which is step 0 here."""
        residency, backend, twin = self.world.residency, await self.world.backend(), await self.world.backend()
        parked = await residency.find_parked(job)
        await self.check_found(job, parked)
        try:
            await residency.add(job, backend, parked=parked)
        except NoRoomToPark:
            return
        self.world.backends[job], self.twins[job] = backend, twin
        if parked is None:
            self.stored.pop(job, None)
        else:
            await copy_trained(backend, twin)

    async def check_found(self, job: str, parked: ParkedState | None) -> None:
        assert (parked is not None) == (job in self.stored)
        if parked is not None:
            copy = self.world.residency._stored.copies[job]
            assert bytes(copy.files[TRAINED].memory) == self.stored[job]

    async def act(self, action: str, job: str, number: int) -> None:
        residency = self.world.residency
        if action == "kill":
            await self.world.killed_and_started()
            self.twins.clear()
            for each in JOBS:
                await self.check_found(each, await self.world.residency.find_parked(each))
            return
        if job not in self.twins:
            await self.attach(job)
        elif action == "leave":
            await residency.remove(job)
            del self.twins[job]
            self.stored.pop(job, None)
        elif action == "relieve":
            await residency.relieve()
        elif action == "prefetch":
            await residency.prefetch(job)
        elif action == "park":
            if self.world.tier(job) == "budget":
                await self.note(job, park=True)
        elif action == "store":
            if self.world.tier(job) == "budget":
                await self.note(job, park=False)
        else:
            await residency.make_resident(job)
            for backend in (self.world.backends[job], self.twins[job]) if action != "resume" else ():
                if action == "accumulate":
                    await backend.accumulate(batch(number), LossSpec())
                elif action == "step":
                    await backend.step(weight=10.0)
                else:
                    await backend.score(batch(number), temperature=1.0, reference=False)

    async def note(self, job: str, *, park: bool) -> None:
        residency = self.world.residency
        await (residency.park(job) if park else residency.store(job))
        self.stored[job] = await trained_bits(self.twins[job])

    async def check(self) -> None:
        report, rules = self.world.residency.report(), self.world.rules
        assert report.budget_bytes <= rules.budget_bytes
        assert report.host_bytes <= rules.host_bytes
        assert report.disk_bytes <= rules.disk_bytes
        for bundle in report.bundles:
            if bundle.tier == "budget":
                assert await bits(self.world.backends[bundle.job]) == await bits(self.twins[bundle.job])
            else:  # parked, by whoever
                self.stored[bundle.job] = await trained_bits(self.twins[bundle.job])
        assert taken(files_in_memory(self.world.directory, "parked-*")) == report.host_bytes
        assert taken((self.world.directory / "parked").iterdir()) == report.disk_bytes
        manifests = [*files_in_memory(self.world.directory, "parked-*.manifest")]
        manifests += (self.world.directory / "parked").glob("*.manifest")
        assert len(manifests) == len(self.world.residency._stored.copies)


def taken(paths: Iterable[Path]) -> int:
    """Whole pages of the parts among these files."""
    sizes = [path.stat().st_size for path in paths if not path.name.endswith((".manifest", ".lock"))]
    return sum(-(-size // PAGE) * PAGE for size in sizes)


async def trained_bits(backend: SimulatedBackend) -> bytes:
    part = backend.parts()[0]
    place = memoryview(bytearray(part.size_bytes))
    await backend.copy_out({TRAINED: Place(place, Path("in memory alone"))}, 1 << 20)
    return bytes(place)


async def copy_trained(source: SimulatedBackend, target: SimulatedBackend) -> None:
    target._policy.weights = source._policy.weights.copy()
    target._policy.momentum = source._policy.momentum.copy()
    target._steps = source._steps


@settings(max_examples=60)
@given(schedule=SCHEDULES, budget=st.integers(1, 3), host=st.integers(0, 5), disk=st.integers(0, 4))
def test_whatever_happens_state_is_whole_and_tiers_keep_their_bounds(
    schedule: list[tuple[str, str]], budget: int, host: int, disk: int
) -> None:
    async def follow() -> None:
        with tempfile.TemporaryDirectory() as place:
            twins = Twins(Path(place) / "service", budget, host, disk)
            await twins.world.residency.open()
            try:
                for number, (action, job) in enumerate([*schedule, ("kill", "a")]):
                    with contextlib.suppress(NoRoomToPark):
                        await twins.act(action, job, number)
                    await twins.check()
            finally:
                World.end()
                remove_parked(twins.world.directory)

    asyncio.run(follow())
