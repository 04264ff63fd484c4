"""The zygote from outside: started, asked for episodes, and started again when it has died.

run(order) ─▶ a zygote, if none lives ─▶ start ─▶ … ─▶ ended: code, the child's line ─▶ Ended
                                            └─ the zygote died ─▶ every episode of it is Ended without either
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple, cast

import msgspec

from actors.environments.episodes.child import EpisodeOrder
from actors.environments.episodes.errors import EnvironmentRefused, EpisodeError
from actors.host.python_path import python_path
from configs.schema import JobConfig


class ZygoteDied(EpisodeError):
    """The zygote ended before it was ready, or does not take what it is told."""


class Ended(NamedTuple):
    """It is how the process of an episode has ended."""

    code: int | None
    """Exit code, 128 + n for signal n; None: the zygote died, and the episode with it."""
    said: dict[str, Any] | None
    """What the child has said of its end, if it got to that."""


class ZygoteHandle:
    """It drives one zygote, of which there is one life at a time. ``follow`` starts a task that reads what it says."""

    def __init__(self, job: JobConfig, log: Path, follow: Callable[[Any], object]) -> None:
        self._job = job
        self._log = log
        self._follow = follow
        self._process: asyncio.subprocess.Process | None = None
        self._starting = asyncio.Lock()
        self._running: dict[str, asyncio.Future[Ended]] = {}

    @property
    def pid(self) -> int | None:
        """Process id of its present life."""
        return self._process.pid if self._process is not None else None

    async def start(self) -> None:
        """Have one that is ready.

        Raises:
            EnvironmentRefused: the environment can never work; says why.
            ZygoteDied: it did not get ready.
        """
        try:
            async with asyncio.timeout(self._job.limits.ready_timeout_s), self._starting:
                if self._process is None:
                    await self._exec()
        except OSError as error:  # time is over, too: whoever waits for another's start has waited as long
            raise ZygoteDied(
                f"the process that environments are forked from could not be started: {error or 'it takes too long'}"
            ) from error

    async def _exec(self) -> None:
        self._log.parent.mkdir(parents=True, exist_ok=True)
        env = {**os.environ, "PYTHONPATH": python_path(), "PYTHONHASHSEED": "0"}  # sets have one order in every life
        with self._log.open("ab") as errors:
            pipe = asyncio.subprocess.PIPE
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-P", "-m", "actors.environments.episodes.zygote"),
                stdin=pipe, stdout=pipe, stderr=errors, start_new_session=True, env=env,
                limit=4 * self._job.limits.episode_result_bytes,
            )  # fmt: skip
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            process.stdin.write(self._job.model_dump_json().encode() + b"\n")
            async with asyncio.timeout(self._job.limits.ready_timeout_s):
                await process.stdin.drain()
                line = await process.stdout.readline()
            said = json.loads(line or b"{}")
        except (TimeoutError, OSError, ValueError) as error:
            await self._bury(process)
            raise ZygoteDied(f"the process that environments are forked from did not get ready: {error}") from error
        if "ready" not in said:
            await self._bury(process)
            if "broken" in said:
                raise EnvironmentRefused(said["broken"])
            raise ZygoteDied(
                f"the process that environments are forked from ended before it was ready: see {self._log}"
            )
        self._process = process
        self._follow(self._read(process))

    async def _read(self, process: asyncio.subprocess.Process) -> None:
        """Hear of ends for as long as it lives; it does not outlive this task."""
        assert process.stdout is not None
        try:
            with contextlib.suppress(ValueError, ConnectionError):  # a line that is none of its own: it is out of order
                while line := await process.stdout.readline():
                    told = json.loads(line)
                    if (future := self._running.pop(told["ended"], None)) is not None and not future.done():
                        future.set_result(Ended(told["code"], _parsed(told["said"])))
        finally:
            self._process = None
            for future in self._running.values():
                if not future.done():
                    future.set_result(Ended(None, None))
            self._running.clear()
            await self._bury(process)

    async def run(self, order: EpisodeOrder, timeout_s: float) -> Ended:
        """Drive an episode; it is killed after ``timeout_s``, and when nobody waits here any more.

        Raises:
            TimeoutError: it was killed for its time.
            EnvironmentRefused, ZygoteDied: as ``start``.
        """
        await self.start()
        future = self._running[order.key] = asyncio.get_running_loop().create_future()
        try:
            self._tell({"start": msgspec.to_builtins(order)})
            async with asyncio.timeout(timeout_s):
                return await asyncio.shield(future)
        finally:
            if not future.done():
                await self._end(order.key, future)

    async def _end(self, key: str, future: asyncio.Future[Ended]) -> None:
        """Kill an episode; if the zygote does not, kill that, and everything with it."""
        self.kill(key)
        try:
            async with asyncio.timeout(self._job.limits.kill_timeout_s):
                await asyncio.shield(future)
        except TimeoutError:
            if self._process is not None:
                _kill(self._process)

    def kill(self, key: str) -> None:
        """End an episode at once, with all that it has started."""
        self._tell({"kill": key})

    def _tell(self, value: dict[str, Any]) -> None:
        if self._process is not None and self._process.stdin is not None:
            with contextlib.suppress(OSError):  # it has died: who reads from it finds out
                self._process.stdin.write(json.dumps(value).encode() + b"\n")

    async def close(self) -> None:
        """End it, and every episode of it."""
        if self._process is not None:
            await self._bury(self._process)

    async def _bury(self, process: asyncio.subprocess.Process) -> None:
        """Kill it, and see that it is gone."""
        _kill(process)
        if process.stdin is not None:
            process.stdin.close()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._job.limits.kill_timeout_s):
                await process.wait()


def _kill(process: asyncio.subprocess.Process) -> None:
    with contextlib.suppress(ProcessLookupError):
        process.kill()


def _parsed(said: str | None) -> dict[str, Any] | None:
    if said is None:
        return None
    try:
        value: Any = json.loads(said)
    except ValueError:
        return None
    return cast("dict[str, Any]", value) if isinstance(value, dict) else None
