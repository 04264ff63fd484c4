"""Where the Tinker server keeps states and weights, and how leftover files go.

    ROOT/operations.db    the operation log
    ROOT/tinker.key       the secret that signs keys of tenants; ROOT/tinker.revoked, those that are void
    ROOT/models/7/state-12, weights-13, sampler-14      what operations 12, 13 and 14 of the seventh model have saved

Invariants
- A directory is written once, by one operation, before the log names it. What no row names is a leftover: of an attempt
  that did not end, or of what was replaced. It is removed when the server opens, or while it runs.
"""

from __future__ import annotations

import asyncio
import contextlib
import shutil
from collections.abc import Callable, Collection, Iterable
from pathlib import Path
from typing import Final, Literal, ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")

What = Literal["state", "weights", "sampler"]
_MODELS: Final = "models"


class Directories:
    """Names, finds and removes the directories below the server's root."""

    def __init__(self, root: Path, limit_s: float) -> None:
        """``limit_s``: time within which the disk removes or finds a directory, or TimeoutError is raised."""
        self._root, self._limit_s = root, limit_s
        self._bytes: dict[str, int] = {}
        """Size of each directory that was written, or found at the start, and not removed yet."""
        self._unnamed: set[str] = set()

    def path(self, name: str) -> Path:
        return self._root / name

    async def fresh(self, model: int, what: What, seq: int) -> str:
        """The name of a directory for what operation ``seq`` saves; nothing is there, and its parent exists."""
        name = f"{_MODELS}/{model}/{what}-{seq}"
        self._bytes.pop(name, None)
        self._unnamed.discard(name)
        await self._off_loop(self._clear, name)
        return name

    def _clear(self, name: str) -> None:
        path = self._root / name
        shutil.rmtree(path, ignore_errors=True)
        path.parent.mkdir(parents=True, exist_ok=True)

    async def exists(self, name: str) -> bool:
        return await self._off_loop(self.path(name).is_dir)

    async def measure(self, name: str) -> None:
        """Note how large a directory is that has just been written."""
        self._bytes[name] = await self._off_loop(_size, self.path(name))

    def size(self, names: Iterable[str]) -> int:
        """Bytes of directories."""
        return sum(self._bytes.get(name, 0) for name in names)

    async def remove(self, name: str) -> None:
        """Remove a directory; one that cannot be removed now is a leftover."""
        self._bytes.pop(name, None)
        with contextlib.suppress(TimeoutError):
            await self._off_loop(shutil.rmtree, self._root / name, ignore_errors=True)

    async def remove_unnamed(self, named: Collection[str]) -> None:
        """Remove what was named by no row now, nor when this was called last: a row may be about to be written."""
        before, self._unnamed = self._unnamed, self._bytes.keys() - set(named)
        for name in sorted(before & self._unnamed):
            if name in self._unnamed:  # else it is being written anew
                await self.remove(name)

    def sweep(self, named: Collection[str]) -> int:
        """Remove all directories but the ``named`` ones, and measure those. Blocks; returns how many were removed."""
        found = [path for path in (self._root / _MODELS).glob("*/*") if str(path.relative_to(self._root)) not in named]
        for path in found:
            shutil.rmtree(path, ignore_errors=True)
        self._bytes = {name: _size(self.path(name)) for name in named}
        return len(found)

    async def _off_loop(self, function: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        """Run a function that touches the disk on a thread; at once where time is virtual, and there are none."""
        if getattr(asyncio.get_running_loop(), "virtual_time", False):
            return function(*args, **kwargs)
        async with asyncio.timeout(self._limit_s):
            return await asyncio.to_thread(function, *args, **kwargs)


def _size(path: Path) -> int:
    return sum(file.stat().st_size for file in path.rglob("*") if file.is_file())
