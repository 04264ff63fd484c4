"""Decides in which tier the state of each of a service's bundles lies, and which one leaves when there is no room.

    budget   tensors that compute: a device's memory; on a CPU only a limit on the bytes counted
      │ copy_out, then release                      ▲ restore
      ▼                                             │
    host     files in shared memory (``parked_files``): they outlive the process
      │ when it is full to its high water           ▲ prefetch
      ▼                                             │ (state that is needed at once is restored directly from disk)
    disk     the same files in the service's directory

Invariants
- State leaves the budget only in ``make_resident``, ``reserve``, ``add`` and ``park``: their caller makes sure that no
  bundle computes meanwhile. All other methods may be called while one does.
- A stored copy is complete and hashed before the memory that it was made from is freed, and before an older copy is
  removed. So a process that is killed at any moment leaves every job its last stored state.
- Only parts that have changed since they were stored are written; a bundle that only scored writes nothing.
- The sum of ``resident_bytes`` of resident bundles and of reservations never exceeds ``budget_bytes``; that of files in
  shared memory, in whole pages, never ``host_bytes``, on disk never ``disk_bytes``. Not counted are manifests (some KiB
  a bundle), the rest of a released bundle (``Parkable.released_bytes``), activations, and frozen references.
- A call that fails leaves every other bundle complete, in its tier or a lower one.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

from actors.train_service.errors import MoveStuck, NeverFits, NoRoomToPark, NotParkable
from actors.train_service.parked_files import ParkedFiles, StoredCopy, is_intact, remove_parked
from actors.train_service.stored_bundles import NoRoom, RunBlocking, StoredBundles, TieredBundle
from actors.train_service.tiers import BundleReport, ParkedState, ResidencyReport, ResidencyRules, Tier
from actors.trainer.errors import ParkedStateDamaged
from actors.trainer.parking import Parkable

__all__ = [
    "BundleReport",
    "ParkedState",
    "Residency",
    "ResidencyReport",
    "ResidencyRules",
    "Tier",
    "remove_parked",
]

P = ParamSpec("P")
R = TypeVar("R")


class Residency:
    """Owns the stored copies of a service's bundles, and moves state between tiers.

    Calls may overlap: moves are made one after the other, in the order of the calls. If a caller is cancelled, its move
    still goes on to its end.
    """

    def __init__(
        self,
        rules: ResidencyRules,
        directory: Path,
        *,
        now: Callable[[], float],
        run_blocking: RunBlocking,
        files: Callable[[Path], ParkedFiles] = ParkedFiles,
    ) -> None:
        """``directory``: the service's own, the same in each of its lives; ``now``, ``run_blocking``: of its ctx."""
        self._rules = rules
        self._now = now
        self._run_blocking = run_blocking
        self._stored = StoredBundles(rules, files(directory), run_blocking)
        self._bundles = self._stored.bundles
        self._reserved: dict[str, int] = {}
        self._moving = asyncio.Lock()
        self._stuck = False
        self._moves: set[asyncio.Task[Any]] = set()
        self._parked = self._resumed = 0

    async def open(self) -> None:
        """Take over earlier lives' copies, and remove half-written ones. Comes before any other call.

        Raises:
            DirectoryInUse: another process has the directory.
        """
        await self._move(self._stored.open)

    async def close(self) -> None:
        """Close the files; stored state stays for the next life (``remove_parked`` removes it)."""
        with contextlib.suppress(MoveStuck):  # then the process is about to end, and its lock with it
            for job in list(self._bundles):
                await self.remove(job, forget=False)
            await self._move(self._stored.close)

    # ------------------------------------------------------------ bundles come and go

    async def reserve(self, job: str, size_bytes: int) -> None:
        """Make room in the budget for a bundle that is about to be started; ``add`` or ``remove`` follows.

        No bundle computes until then: starting one is a slice of its own.

        Raises:
            NeverFits: the bundle is larger than the budget.
            NoRoomToPark: a bundle that would have to leave cannot be parked.
        """
        await self._move(self._reserve, job, size_bytes)

    async def _reserve(self, job: str, size_bytes: int) -> None:
        self._reserved.pop(job, None)
        await self._make_room(size_bytes, job)
        self._reserved[job] = size_bytes

    async def find_parked(self, job: str) -> ParkedState | None:
        """The last stored state of ``job``, all of its bytes checked; None: there is none. Removes a damaged one."""
        return await self._move(self._find, job)

    async def _find(self, job: str) -> ParkedState | None:
        copy = self._stored.copies.get(job)
        if copy is None:
            return None
        if not await self._run_blocking(is_intact, copy):
            await self._stored.forget(job)
            return None
        return _state(copy)

    async def add(self, job: str, backend: Parkable, *, parked: ParkedState | None = None) -> None:
        """Take charge of a backend that has been started, and so is resident. Removes the job's older stored state.

        ``parked``: continue from this state. Gradient sums of a half step are dropped, the rest is restored.

        Raises:
            NeverFits, NoRoomToPark: as ``reserve``; the caller keeps the backend and closes it.
            ParkedStateDamaged: ``parked`` is of another model, or has been altered since; likewise.
        """
        await self._move(self._add, job, backend, parked)

    async def _add(self, job: str, backend: Parkable, parked: ParkedState | None) -> None:
        if job in self._bundles:
            raise NotParkable(f"job {job!r} has a bundle already; remove it first")
        await self._reserve(job, backend.resident_bytes())
        try:
            if parked is None:
                await self._stored.forget(job)
            self._bundles[job] = bundle = TieredBundle(job, backend, last_used_s=self._now())
            if parked is not None:
                await self._stored.go_on(bundle, parked.hash)
        except BaseException:
            self._bundles.pop(job, None)
            raise
        finally:
            del self._reserved[job]

    async def remove(self, job: str, *, forget: bool = True) -> None:
        """Remove a bundle, whose owner closes the backend afterwards. ``forget``: also remove its stored state."""
        await self._move(self._remove, job, forget)

    async def _remove(self, job: str, forget: bool) -> None:
        self._reserved.pop(job, None)
        await self._stored.leave(job)
        self._bundles.pop(job, None)
        if forget:
            await self._stored.forget(job)

    # ------------------------------------------------------------ into the budget

    async def make_resident(self, job: str) -> float:
        """Bring the state of ``job`` into the budget; returns the seconds that this took, 0 if it was there.

        Raises:
            NoRoomToPark: a bundle that would have to leave cannot be parked.
            ParkedStateDamaged: its stored copy was altered, and has been removed: this life of the bundle is over.
        """
        began = self._now()
        return self._now() - began if await self._move(self._hold, job) else 0.0

    async def _hold(self, job: str) -> bool:
        bundle = self._stored.bundle(job)
        bundle.last_used_s = self._now()
        if bundle.resident:
            return False
        await self._make_room(bundle.backend.resident_bytes(), job)
        await self._resume(bundle)
        return True

    async def prefetch(self, job: str) -> None:
        """Bring the state of ``job`` to the highest tier with room, while all others stay where they are.

        Never raises for lack of room, or for a damaged copy: ``make_resident`` will.
        """
        await self._move(self._prefetch, job)

    async def _prefetch(self, job: str) -> None:
        bundle = self._stored.bundle(job)
        if bundle.resident:
            return
        try:
            if self._budget_used + bundle.backend.resident_bytes() <= self._rules.budget_bytes:
                await self._resume(bundle)
            else:
                await self._stored.fetch(job)
        except (NoRoom, ParkedStateDamaged):
            return

    async def _resume(self, bundle: TieredBundle) -> None:
        await self._stored.resume(bundle)
        self._resumed += 1

    # ------------------------------------------------------------ out of the budget

    async def store(self, job: str) -> None:
        """Write the changed parts of ``job`` to the host tier, or to disk if that is full; the bundle stays resident.

        Called after a burst, before its answer, this makes the trained step outlive the process.

        Raises:
            NoRoomToPark: there is no room; the last stored state is as it was.
        """
        await self._move(self._store, job)

    async def _store(self, job: str) -> None:
        await self._stored.store(self._stored.bundle(job))

    async def park(self, job: str) -> None:
        """``store`` the state, then free its memory in the budget.

        Raises:
            NoRoomToPark: as ``store``; the bundle stays resident.
        """
        await self._move(self._park, job)

    async def _park(self, job: str) -> None:
        bundle = self._stored.bundle(job)
        if not bundle.resident:
            return
        await self._stored.store(bundle)
        await bundle.backend.release()
        bundle.resident = False
        self._parked += 1

    async def _make_room(self, size_bytes: int, job: str) -> None:
        """Free ``size_bytes`` of the budget by parking the least useful bundles."""
        if size_bytes > self._rules.budget_bytes:
            raise NeverFits(
                f"job {job!r} needs {size_bytes:,} bytes for weights, optimizer and gradients, and the service has "
                f"{self._rules.budget_bytes:,}: give it more memory_bytes, or the job a service or trainer of its own"
            )
        while self._budget_used + size_bytes > self._rules.budget_bytes:
            leaves = self._stored.least_useful(bundle for bundle in self._bundles.values() if bundle.resident)
            if leaves is None:
                raise NoRoomToPark(f"job {job!r}: others have reserved the budget's {self._budget_used:,} bytes")
            await self._park(leaves.job)

    @property
    def _budget_used(self) -> int:
        resident = sum(bundle.backend.resident_bytes() for bundle in self._bundles.values() if bundle.resident)
        return resident + sum(self._reserved.values())

    # ------------------------------------------------------------ relief and report

    async def relieve(self) -> None:
        """Bring the host tier below its high water, if the disk has room. For moments when nobody waits."""
        while await self._move(self._stored.relieve_one):
            pass

    def report(self) -> ResidencyReport:
        return ResidencyReport(
            bundles=tuple(self._stored.report(bundle) for _, bundle in sorted(self._bundles.items())),
            budget_bytes=self._budget_used,
            host_bytes=self._stored.used_bytes["host"],
            disk_bytes=self._stored.used_bytes["disk"],
            parked=self._parked,
            resumed=self._resumed,
            demoted=self._stored.demoted,
            fetched=self._stored.fetched,
            written_bytes=self._stored.written_bytes,
        )

    async def _move(self, move: Callable[P, Coroutine[Any, Any, R]], *args: P.args, **kwargs: P.kwargs) -> R:
        """Make one move, after all earlier ones; it goes on to its end even if its caller is cancelled.

        Raises:
            MoveStuck: this move, or one before it, was not over in time.
        """
        limit_s = self._rules.move_timeout_s

        async def alone() -> R:
            begun = False
            try:
                async with asyncio.timeout(limit_s), self._moving:
                    if self._stuck:
                        raise MoveStuck("a move before this one was not over in time: this service must start again")
                    begun = True
                    return await move(*args, **kwargs)
            except TimeoutError as error:
                self._stuck = self._stuck or begun
                raise MoveStuck(f"state was not moved within {limit_s:g} s (limits.service_move_timeout_s)") from error

        task = asyncio.create_task(alone(), name="residency")
        self._moves.add(task)
        task.add_done_callback(self._moved)
        return await asyncio.shield(task)

    def _moved(self, task: asyncio.Task[Any]) -> None:
        """Forget a move that is over. Reading its error keeps asyncio from warning where no caller waits for it."""
        self._moves.discard(task)
        if not task.cancelled():
            task.exception()


def _state(copy: StoredCopy) -> ParkedState:
    manifest = copy.manifest
    return ParkedState(
        job=manifest.job, steps=manifest.steps, hash=manifest.hash, size_bytes=manifest.size_bytes, tier=copy.tier
    )
