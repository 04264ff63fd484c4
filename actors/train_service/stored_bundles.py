"""Stored copies of bundles: written, replaced, and moved between host memory and disk to make room.

    store     changed parts ─▶ new files, or spare ones ─▶ manifest ─▶ the older copy's files: spare now, or gone
    room      spares go first, then the least useful copy moves to disk; if there is neither, ``NoRoom``

Invariants
- Files of a copy lie in one tier. All parts are written if the older copy lies in another, else only the changed ones.
- A job's older copy is whole until the newer one is.
- Making room for a job never moves that job's own copy.

``Residency`` calls one method at a time.
"""

from __future__ import annotations

import contextlib
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import ParamSpec, Protocol, TypeVar

from actors.host.room import no_space
from actors.train_service.errors import NoRoomToPark, NotParkable, ResidencyError
from actors.train_service.parked_files import CHUNK_BYTES, ParkedFiles, PartFile, StoredCopy
from actors.train_service.parked_files import Tier as StoredTier
from actors.train_service.parked_manifest import ManifestPart, ParkedManifest
from actors.train_service.tiers import BundleReport, ResidencyRules
from actors.trainer.errors import BackendClosed, ParkedStateDamaged
from actors.trainer.parking import TRAINED, Parkable, Place, StatePart

P = ParamSpec("P")
R = TypeVar("R")


class RunBlocking(Protocol):
    """Runs a function that blocks, as ``Context.run_blocking`` does."""

    def __call__(self, function: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> Awaitable[R]: ...


class NoRoom(ResidencyError):
    """A tier has no room, and nothing there can be moved or dropped. This error does not leave the package."""


@dataclass(slots=True, eq=False)
class TieredBundle:
    """Holds one job's backend, and where its state lies."""

    job: str
    backend: Parkable
    last_used_s: float
    resident: bool = True
    stored_versions: dict[str, int] = field(default_factory=dict[str, int])
    """Versions of the parts in the stored copy."""
    spares: dict[str, PartFile] = field(default_factory=dict[str, PartFile])
    """Files of the copy before last, by part, kept for the next copy: their pages are allocated and pinned."""


class StoredBundles:
    """Owns all stored copies of a service: of attached jobs, and of jobs that may attach again."""

    def __init__(self, rules: ResidencyRules, files: ParkedFiles, run_blocking: RunBlocking) -> None:
        self._rules, self._files, self._run_blocking = rules, files, run_blocking
        self._limits: dict[StoredTier, int] = {"host": rules.host_bytes, "disk": rules.disk_bytes}
        self.bundles: dict[str, TieredBundle] = {}
        self.copies: dict[str, StoredCopy] = {}
        self.used_bytes = files.used_bytes
        self.demoted = self.fetched = self.written_bytes = 0

    async def open(self) -> None:
        self.copies.update(await self._run_blocking(self._files.open))

    async def close(self) -> None:
        await self._run_blocking(self._files.close)

    def bundle(self, job: str) -> TieredBundle:
        if job not in self.bundles:
            raise NotParkable(f"job {job!r} has no bundle in this service")
        return self.bundles[job]

    def copy(self, job: str) -> StoredCopy:
        """The stored copy of a bundle that is parked."""
        if job not in self.copies:
            raise ParkedStateDamaged(
                f"the parked state of job {job!r} was damaged and is gone; resume from a checkpoint"
            )
        return self.copies[job]

    @staticmethod
    def least_useful(bundles: Iterable[TieredBundle]) -> TieredBundle | None:
        """The least recently used bundle."""
        return min(bundles, key=lambda bundle: bundle.last_used_s, default=None)

    # ------------------------------------------------------------ out of the budget, and back

    async def store(self, bundle: TieredBundle) -> None:
        """Write the changed parts of a resident bundle.

        Raises:
            NoRoomToPark: no tier has room; the older copy is unchanged.
        """
        parts, copy = bundle.backend.parts(), self.copies.get(bundle.job)
        if not bundle.resident or (copy is not None and not _changed(bundle, parts)):
            return
        for tier in self._limits:
            same = copy is not None and copy.tier == tier
            changed = [
                part
                for part in parts
                if part.blocks and (not same or part.version != bundle.stored_versions.get(part.name))
            ]
            try:
                made = await self._places(bundle, tier, changed)
            except NoRoom:
                continue
            await self._write(bundle, tier, parts, made)
            return
        raise self._no_room(bundle, parts)

    def _no_room(self, bundle: TieredBundle, parts: Iterable[StatePart]) -> NoRoomToPark:
        needed = sum(part.size_bytes for part in parts)
        return NoRoomToPark(
            f"job {bundle.job!r}: its state of {needed:,} bytes cannot be parked: of {self._rules.host_bytes:,} bytes "
            f"of host memory {self.used_bytes['host']:,} are taken, of {self._rules.disk_bytes:,} on disk "
            f"{self.used_bytes['disk']:,}; give the service more host_bytes or disk_bytes, or fewer jobs"
        )

    async def _places(self, bundle: TieredBundle, tier: StoredTier, parts: list[StatePart]) -> dict[str, PartFile]:
        """Files to write ``parts`` to.

        Raises:
            NoRoom: the tier has no room, and none could be made.
        """
        made: dict[str, PartFile] = {}
        try:
            for part in parts:
                spare = bundle.spares.pop(part.name, None) if tier == "host" else None
                if spare is not None and spare.size_bytes != part.size_bytes:
                    await self._drop(spare, bundle)
                    spare = None
                made[part.name] = spare or await self._make(tier, bundle.job, part.size_bytes)
        except BaseException:
            for file in made.values():
                await self._drop(file, bundle)
            raise
        return made

    async def _make(self, tier: StoredTier, job: str, size_bytes: int, *, demoting: bool = True) -> PartFile:
        """A new file for ``job``; drops spares and moves others' copies if that is needed for room.

        Raises:
            NoRoom: that is not enough.
        """
        while True:
            if self.used_bytes[tier] + PartFile(Path(), tier, size_bytes).taken_bytes <= self._limits[tier]:
                try:
                    return await self._run_blocking(self._files.make, tier, job, size_bytes)
                except OSError as error:
                    if no_space(error, Path(), "parked state") is None:
                        raise
            if tier == "disk" or not await self._free_some(job, demoting=demoting):
                raise NoRoom

    async def _write(
        self, bundle: TieredBundle, tier: StoredTier, parts: tuple[StatePart, ...], made: dict[str, PartFile]
    ) -> None:
        old = self.copies.get(bundle.job)
        known = {} if old is None else {part.name: part for part in old.manifest.parts}
        files = {part.name: made.get(part.name) or _file(old, part.name) for part in parts if part.blocks}
        try:
            places = {name: Place(file.memory, file.path) for name, file in made.items()}
            digests = await bundle.backend.copy_out(places, CHUNK_BYTES)
            manifest = ParkedManifest(
                job=bundle.job,
                fingerprint=bundle.backend.fingerprint(),
                steps=bundle.backend.steps,
                generation=1 if old is None else old.manifest.generation + 1,
                chunk_bytes=CHUNK_BYTES,
                parts=tuple(
                    ManifestPart(
                        name=part.name,
                        file=files[part.name].path.name,
                        blocks=part.blocks,
                        hashes=digests[part.name] if part.name in made else known[part.name].hashes,
                    )
                    for part in parts
                    if part.blocks
                ),
            )
            self.copies[bundle.job] = await self._run_blocking(self._files.commit, manifest, tier, files)
        except BaseException as error:
            for file in made.values():
                await self._drop(file, bundle)
            if isinstance(error, OSError) and no_space(error, Path(), "parked state") is not None:
                raise self._no_room(bundle, parts) from error
            raise
        bundle.stored_versions = {part.name: part.version for part in parts}
        self.written_bytes += sum(file.size_bytes for file in made.values())
        if old is not None:
            await self._replaced(bundle, old, files)

    async def _replaced(self, bundle: TieredBundle, old: StoredCopy, files: dict[str, PartFile]) -> None:
        """Keep the older copy's files as spares, or remove them."""
        await self._run_blocking(self._files.withdraw, old)
        for name, file in old.files.items():
            if files.get(name) is file:
                continue
            if file.tier == "host" and name not in bundle.spares and not self._is_high:
                bundle.spares[name] = file
            else:
                await self._drop(file, bundle)

    async def resume(self, bundle: TieredBundle) -> None:
        """Restore a parked bundle from where its copy lies.

        Raises:
            ParkedStateDamaged: the copy was altered, and has been removed.
        """
        copy = self.copy(bundle.job)
        try:
            await bundle.backend.restore(copy.parts())
        except ParkedStateDamaged:
            await self.forget(bundle.job)
            raise
        bundle.resident = True
        bundle.stored_versions = {part.name: part.version for part in bundle.backend.parts()}

    async def go_on(self, bundle: TieredBundle, state_hash: str) -> None:
        """Restore the state that was found for a job into its new backend, without the gradient sums.

        Raises:
            ParkedStateDamaged: the copy is gone; or it is another model's or was altered, and has been removed.
        """
        job, copy = bundle.job, self.copies.get(bundle.job)
        if copy is None or copy.manifest.hash != state_hash:
            raise ParkedStateDamaged(f"the parked state of job {job!r} that was found is not there any more")
        try:
            if copy.manifest.fingerprint != bundle.backend.fingerprint():
                raise ParkedStateDamaged(
                    f"the parked state of job {job!r} is another model's or dtype's: it is not used"
                )
            await bundle.backend.restore({TRAINED: copy.part(TRAINED)})
        except ParkedStateDamaged:
            await self.forget(job)
            raise
        bundle.stored_versions = {part.name: part.version for part in bundle.backend.parts() if part.name == TRAINED}

    # ------------------------------------------------------------ between host memory and disk

    @property
    def _is_high(self) -> bool:
        return self.used_bytes["host"] > self._rules.high_water * self._rules.host_bytes

    async def relieve_one(self) -> bool:
        """Make some room in host memory if it is above the high-water mark; whether any was made."""
        return self._is_high and await self._free_some(None)

    async def _free_some(self, job: str | None, *, demoting: bool = True) -> bool:
        """Drop a spare file, else move the least useful copy that is not ``job``'s to disk; whether either was done."""
        bundles = sorted(self.bundles.values(), key=lambda bundle: bundle.last_used_s)
        for bundle in bundles:
            if bundle.spares:
                _, spare = bundle.spares.popitem()
                await self._drop(spare, bundle)
                return True
        order = [*sorted(set(self.copies) - set(self.bundles)), *(bundle.job for bundle in bundles)]
        for other in order if demoting else ():
            copy = self.copies.get(other)
            if other != job and copy is not None and copy.tier == "host" and await self._demote(other):
                return True
        return False

    async def _demote(self, job: str) -> bool:
        """Move a copy to disk, or remove it if it was damaged. False: there is no room."""
        copy = self.copies[job]
        if self.used_bytes["disk"] + copy.taken_bytes > self._rules.disk_bytes:
            return False
        with contextlib.suppress(NoRoom):
            await self._moved(job, copy, "disk")
            self.demoted += 1
            return True
        return False

    async def fetch(self, job: str) -> None:
        """Move a copy from disk to host memory, if that moves no other job's copy out.

        Raises:
            NoRoom: there is no room without that.
            ParkedStateDamaged: the copy was altered, and has been removed.
        """
        copy = self.copy(job)
        if copy.tier == "host":
            return
        while self.used_bytes["host"] + copy.taken_bytes > self._rules.host_bytes:
            if not await self._free_some(job, demoting=False):
                raise NoRoom
        await self._moved(job, copy, "host")
        if job not in self.copies:
            raise ParkedStateDamaged(f"the parked state of job {job!r} was altered: it is not used")
        self.fetched += 1

    async def _moved(self, job: str, copy: StoredCopy, tier: StoredTier) -> None:
        try:
            moved = await self._run_blocking(self._files.moved, copy, tier)
        except ParkedStateDamaged:
            await self.forget(job)
            return
        except OSError as error:
            if no_space(error, Path(), "parked state") is None:
                raise
            raise NoRoom from error
        self.copies[job] = moved
        await self._unmap(copy, self.bundles.get(job))
        await self._run_blocking(self._files.forget, copy)

    # ------------------------------------------------------------ removing

    async def forget(self, job: str) -> None:
        """Remove a job's stored copy, if there is one."""
        copy, bundle = self.copies.pop(job, None), self.bundles.get(job)
        if bundle is not None:
            bundle.stored_versions = {}
        if copy is not None:
            await self._unmap(copy, bundle)
            await self._run_blocking(self._files.forget, copy)

    async def leave(self, job: str) -> None:
        """Drop the spares of ``job`` and unpin its copy, since its bundle is about to be removed."""
        bundle = self.bundles.get(job)
        if bundle is None:
            return
        while bundle.spares:
            _, spare = bundle.spares.popitem()
            await self._drop(spare, bundle)
        if job in self.copies:
            await self._unmap(self.copies[job], bundle)

    async def _unmap(self, copy: StoredCopy, bundle: TieredBundle | None) -> None:
        for file in copy.files.values():
            await self._let_go(file, bundle)
            file.mapped = None

    async def _drop(self, file: PartFile, bundle: TieredBundle | None) -> None:
        await self._let_go(file, bundle)
        await self._run_blocking(self._files.remove, file)

    @staticmethod
    async def _let_go(file: PartFile, bundle: TieredBundle | None) -> None:
        if file.mapped is not None and bundle is not None:
            with contextlib.suppress(BackendClosed):
                await bundle.backend.forget_place(file.mapped)

    def report(self, bundle: TieredBundle) -> BundleReport:
        copy = self.copies.get(bundle.job)
        spares = sum(file.taken_bytes for file in bundle.spares.values())
        in_host = 0 if copy is None or copy.tier == "disk" else copy.taken_bytes
        return BundleReport(
            job=bundle.job,
            tier="budget" if bundle.resident else "host" if copy is None else copy.tier,
            resident_bytes=bundle.backend.resident_bytes() if bundle.resident else 0,
            host_bytes=in_host + spares,
            disk_bytes=copy.taken_bytes if copy is not None and copy.tier == "disk" else 0,
        )


def _changed(bundle: TieredBundle, parts: Iterable[StatePart]) -> bool:
    return any(bundle.stored_versions.get(part.name) != part.version for part in parts)


def _file(copy: StoredCopy | None, name: str) -> PartFile:
    if copy is None:
        raise NotParkable(f"part {name!r} has neither a new file nor an older one")
    return copy.files[name]
