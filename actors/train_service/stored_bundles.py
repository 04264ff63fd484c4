"""Stored copies of bundles: written, replaced, moved between host memory and disk, and given up for others' room.

    store     changed parts ─▶ new files, or spare ones ─▶ manifest ─▶ the older copy's files: spare now, or gone
    room      spares go first, then the least useful copy moves to disk; where neither is there, ``NoRoom``

Invariants
- Files of a copy lie in one tier. Where the older copy lies in another, all parts are written, else those that changed.
- A job's older copy is whole until the newer one is.
- Who makes room for one job never takes that job's own copy.

``Residency`` calls one method at a time.
"""

from __future__ import annotations

import contextlib
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import ParamSpec, Protocol, TypeVar

from actors.host.room import no_space
from actors.train_service.parked_files import CHUNK_BYTES, ParkedFiles, PartFile, StoredCopy
from actors.train_service.parked_files import Tier as StoredTier
from actors.train_service.parked_manifest import ManifestPart, ParkedManifest
from actors.train_service.residency_errors import NoRoomToPark, NotParkable, ResidencyError
from actors.train_service.tiers import BundleReport, ResidencyRules
from actors.trainer.errors import BackendClosed, ParkedStateDamaged
from actors.trainer.parking import TRAINED, Parkable, StatePart

P = ParamSpec("P")
R = TypeVar("R")


class RunBlocking(Protocol):
    """Runs a function that blocks, as ``Context.run_blocking`` does."""

    def __call__(self, function: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> Awaitable[R]: ...


class NoRoom(ResidencyError):
    """A tier has no room, and nobody there can give any. It stays in this room."""


@dataclass(slots=True, eq=False)
class Bundle:
    """Holds one job's backend, and what is known of its state."""

    job: str
    backend: Parkable
    last_used_s: float
    needed_at_s: float | None = None
    """When it is likely to be needed next; None: nobody knows."""
    resident: bool = True
    stored_versions: dict[str, int] = field(default_factory=dict[str, int])
    """Versions of the parts in the stored copy."""
    spares: dict[str, PartFile] = field(default_factory=dict[str, PartFile])
    """Files of the copy before last, by part: their pages are there, and pinned, for the next one."""

    def usefulness(self) -> tuple[bool, float, float]:
        """Less useful than another if it is greater: needed by nobody knows when, or later, or last used longer ago."""
        return self.needed_at_s is None, self.needed_at_s or 0.0, -self.last_used_s


class StoredBundles:
    """Owns all stored copies of a service, of jobs that are attached and of those that may come back."""

    def __init__(self, rules: ResidencyRules, files: ParkedFiles, run_blocking: RunBlocking) -> None:
        self._rules, self._files, self._run_blocking = rules, files, run_blocking
        self._limits: dict[StoredTier, int] = {"host": rules.host_bytes, "disk": rules.disk_bytes}
        self.bundles: dict[str, Bundle] = {}
        self.copies: dict[str, StoredCopy] = {}
        self.used_bytes = files.used_bytes
        self.demoted = self.fetched = self.written_bytes = 0

    async def open(self) -> None:
        self.copies.update(await self._run_blocking(self._files.open))

    async def close(self) -> None:
        await self._run_blocking(self._files.close)

    def bundle(self, job: str) -> Bundle:
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
    def least_useful(bundles: Iterable[Bundle]) -> Bundle | None:
        return max(bundles, key=Bundle.usefulness, default=None)

    # ------------------------------------------------------------ out of the budget, and back

    async def store(self, bundle: Bundle) -> None:
        """Write what has changed of a resident bundle.

        Raises:
            NoRoomToPark: no tier has room; the copy that there was is as it was.
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

    def _no_room(self, bundle: Bundle, parts: Iterable[StatePart]) -> NoRoomToPark:
        needed = sum(part.size_bytes for part in parts)
        return NoRoomToPark(
            f"job {bundle.job!r}: its state of {needed:,} bytes cannot be parked: of {self._rules.host_bytes:,} bytes "
            f"of host memory {self.used_bytes['host']:,} are taken, of {self._rules.disk_bytes:,} on disk "
            f"{self.used_bytes['disk']:,}; give the service more host_bytes or disk_bytes, or fewer jobs"
        )

    async def _places(self, bundle: Bundle, tier: StoredTier, parts: list[StatePart]) -> dict[str, PartFile]:
        """Files to write ``parts`` to.

        Raises:
            NoRoom: the tier has none, and nobody could make it.
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
        """A new file for ``job``, others' spares and copies out of its way.

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
        self, bundle: Bundle, tier: StoredTier, parts: tuple[StatePart, ...], made: dict[str, PartFile]
    ) -> None:
        old = self.copies.get(bundle.job)
        known = {} if old is None else {part.name: part for part in old.manifest.parts}
        files = {part.name: made.get(part.name) or _file(old, part.name) for part in parts if part.blocks}
        try:
            digests = await bundle.backend.copy_out({name: file.memory for name, file in made.items()}, CHUNK_BYTES)
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

    async def _replaced(self, bundle: Bundle, old: StoredCopy, files: dict[str, PartFile]) -> None:
        """Keep the older copy's files for the next one, or remove them."""
        await self._run_blocking(self._files.withdraw, old)
        for name, file in old.files.items():
            if files.get(name) is file:
                continue
            if file.tier == "host" and name not in bundle.spares and not self._is_high:
                bundle.spares[name] = file
            else:
                await self._drop(file, bundle)

    async def resume(self, bundle: Bundle) -> None:
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

    async def go_on(self, bundle: Bundle, state_hash: str) -> None:
        """Give a backend that has just been started the stored state that was found for its job, but the sums.

        Raises:
            ParkedStateDamaged: it is not there any more, is another model's, or was altered: then it has been removed.
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
        """Make some room in host memory if it is fuller than it should be; whether there was some to be made."""
        return self._is_high and await self._free_some(None)

    async def _free_some(self, job: str | None, *, demoting: bool = True) -> bool:
        """Drop a spare file, else move the least useful copy to disk, none of ``job``; whether that could be done."""
        bundles = sorted(self.bundles.values(), key=Bundle.usefulness, reverse=True)
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
        """Move a copy to disk; False: there is no room. One that was damaged goes altogether."""
        copy = self.copies[job]
        if self.used_bytes["disk"] + copy.taken_bytes > self._rules.disk_bytes:
            return False
        with contextlib.suppress(NoRoom):
            await self._moved(job, copy, "disk")
            self.demoted += 1
            return True
        return False

    async def fetch(self, job: str) -> None:
        """Move a copy from disk to host memory, where it needs nobody else's.

        Raises:
            NoRoom: it would.
            ParkedStateDamaged: it was altered, and has been removed.
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

    # ------------------------------------------------------------ gone

    async def forget(self, job: str) -> None:
        """Remove a job's stored copy, if there is one."""
        copy, bundle = self.copies.pop(job, None), self.bundles.get(job)
        if bundle is not None:
            bundle.stored_versions = {}
        if copy is not None:
            await self._unmap(copy, bundle)
            await self._run_blocking(self._files.forget, copy)

    async def leave(self, job: str) -> None:
        """The bundle of ``job`` is about to go: nothing of ours is pinned by its backend any more."""
        bundle = self.bundles.get(job)
        if bundle is None:
            return
        while bundle.spares:
            _, spare = bundle.spares.popitem()
            await self._drop(spare, bundle)
        if job in self.copies:
            await self._unmap(self.copies[job], bundle)

    async def _unmap(self, copy: StoredCopy, bundle: Bundle | None) -> None:
        for file in copy.files.values():
            await self._let_go(file, bundle)
            file.mapped = None

    async def _drop(self, file: PartFile, bundle: Bundle | None) -> None:
        await self._let_go(file, bundle)
        await self._run_blocking(self._files.remove, file)

    @staticmethod
    async def _let_go(file: PartFile, bundle: Bundle | None) -> None:
        if file.mapped is not None and bundle is not None:
            with contextlib.suppress(BackendClosed):
                await bundle.backend.forget_place(file.mapped)

    def report(self, bundle: Bundle) -> BundleReport:
        copy = self.copies.get(bundle.job)
        spares = sum(file.taken_bytes for file in bundle.spares.values())
        in_host = 0 if copy is None or copy.tier == "disk" else copy.taken_bytes
        parts = bundle.backend.parts()
        return BundleReport(
            job=bundle.job,
            tier="budget" if bundle.resident else "host" if copy is None else copy.tier,
            resident_bytes=bundle.backend.resident_bytes() if bundle.resident else 0,
            released_bytes=0 if bundle.resident else bundle.backend.released_bytes(),
            host_bytes=in_host + spares,
            disk_bytes=copy.taken_bytes if copy is not None and copy.tier == "disk" else 0,
            unsaved_bytes=sum(p.size_bytes for p in parts if bundle.stored_versions.get(p.name) != p.version),
            steps_stored=None if copy is None else copy.manifest.steps,
        )


def _changed(bundle: Bundle, parts: Iterable[StatePart]) -> bool:
    return any(bundle.stored_versions.get(part.name) != part.version for part in parts)


def _file(copy: StoredCopy | None, name: str) -> PartFile:
    if copy is None:
        raise NotParkable(f"part {name!r} has neither a new file nor an older one")
    return copy.files[name]
