"""The zygote from outside: started, asked for episodes, and started again when it has died.

run(order) ─▶ start a zygote if none runs ─▶ start the episode ─▶ its exit code and the child's last line ─▶ Ended
                                                               └─ the zygote died ─▶ each of its episodes is Ended
                                                                                     without code and line

How the process of an episode ended says what became of the episode, and whose fault that was (``verdict_on``):

    reported a reward ───────────▶ the reward, and what ended the episode
    reported a failure ──────────▶ that failure
    killed by us at its deadline ▶ no result: the environment hung
    ended without a report ──────▶ by SIGKILL, SIGTERM or SIGHUP: infrastructure, as somebody outside did that;
                                   otherwise no result, as the environment did that
    its zygote died ─────────────▶ infrastructure

A failure of the infrastructure never becomes a reward: the episode is begun again and *replayed*, which means that the
ledger answers with what the model has said already. So a model gains nothing by breaking its environment: the same
words break it again, until ``environment.attempts`` are used up, and a sample without a result teaches nothing. What an
environment knows to be the model's doing, it grades itself.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import signal
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final, NamedTuple, cast

import msgspec

from actors.environments.episodes.child import EpisodeOrder
from actors.environments.episodes.errors import EnvironmentRefused, EpisodeError
from actors.environments.episodes.interface import NOTHING
from actors.host.helper_process import HelperProcess
from actors.protocol.failures import Failure, FailureKind
from configs.schema import JobConfig

_OUTSIDE: Final = frozenset([128 + signal.SIGKILL, 128 + signal.SIGTERM, 128 + signal.SIGHUP])
"""Exit codes of processes that somebody else has ended: an operator, or the kernel for want of memory."""


class ZygoteDied(EpisodeError):
    """The zygote could not be started, or ended before it was ready."""


class Ended(NamedTuple):
    """How the process of an episode has ended."""

    code: int | None
    """Exit code, 128 + n for signal n; None: the zygote died, and the episode with it."""
    said: dict[str, Any] | None
    """Last line of the child, which says how it ended; None if it ended without one."""


class ZygoteHandle:
    """The handle drives the zygote process, starting it again if it has died. ``follow`` runs a coroutine as a task."""

    def __init__(self, job: JobConfig, log: Path, follow: Callable[[Any], object]) -> None:
        self._job = job
        self._log = log
        self._follow = follow
        self._process: HelperProcess | None = None
        self._starting = asyncio.Lock()
        self._running: dict[str, asyncio.Future[Ended]] = {}

    @property
    def pid(self) -> int | None:
        """Process id of the zygote that runs now."""
        return self._process.pid if self._process is not None else None

    async def start(self) -> None:
        """Start a zygote and wait until it is ready, unless one runs already.

        Raises:
            EnvironmentRefused: the environment can never work; says why.
            ZygoteDied: the zygote did not get ready.
        """
        try:
            async with asyncio.timeout(self._job.limits.ready_timeout_s), self._starting:
                if self._process is None:
                    await self._exec()
        except OSError as error:  # TimeoutError is one: another caller's start, awaited here, took too long
            raise ZygoteDied(
                f"the process that environments are forked from could not be started: {error or 'it takes too long'}"
            ) from error

    async def _exec(self) -> None:
        self._log.parent.mkdir(parents=True, exist_ok=True)
        limits = self._job.limits
        process = await HelperProcess.start(
            "actors.environments.episodes.zygote", self._log, line_bytes=4 * limits.episode_result_bytes,
            PYTHONHASHSEED="0",  # sets have one order in every life
        )  # fmt: skip
        try:
            async with asyncio.timeout(limits.ready_timeout_s):
                await process.feed(self._job.model_dump_json().encode() + b"\n", limits.ready_timeout_s)
                line = await process.line()
            said = json.loads(line or b"{}")
        except (TimeoutError, OSError, ValueError) as error:
            await self._kill_process(process)
            raise ZygoteDied(f"the process that environments are forked from did not get ready: {error}") from error
        if "ready" not in said:
            await self._kill_process(process)
            if "broken" in said:
                raise EnvironmentRefused(said["broken"])
            raise ZygoteDied(
                f"the process that environments are forked from ended before it was ready: see {self._log}"
            )
        self._process = process
        self._follow(self._read(process))

    async def _read(self, process: HelperProcess) -> None:
        """Note the ends of episodes for as long as the zygote lives; it does not outlive this task."""
        try:
            with contextlib.suppress(ValueError, ConnectionError):  # a line that is no report: the zygote is broken
                while line := await process.line():
                    told = json.loads(line)
                    if (future := self._running.pop(told["ended"], None)) is not None and not future.done():
                        future.set_result(Ended(told["code"], _parsed(told["said"])))
        finally:
            self._process = None
            for future in self._running.values():
                if not future.done():
                    future.set_result(Ended(None, None))
            self._running.clear()
            await self._kill_process(process)

    async def run(self, order: EpisodeOrder, timeout_s: float) -> Ended:
        """Run an episode to its end; it is killed after ``timeout_s``, or when this call is cancelled.

        Raises:
            TimeoutError: the episode was killed after ``timeout_s``.
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
        """Have the zygote kill an episode; if it does not in time, kill the zygote and all its episodes."""
        self.kill(key)
        try:
            async with asyncio.timeout(self._job.limits.kill_timeout_s):
                await asyncio.shield(future)
        except TimeoutError:
            if self._process is not None:
                self._process.kill()

    def kill(self, key: str) -> None:
        """End an episode at once, with all that it has started."""
        self._tell({"kill": key})

    def _tell(self, value: dict[str, Any]) -> None:
        if self._process is not None:
            self._process.tell(json.dumps(value).encode() + b"\n")

    async def close(self) -> None:
        """End the zygote, and every episode that it runs."""
        if self._process is not None:
            await self._kill_process(self._process)

    async def _kill_process(self, process: HelperProcess) -> None:
        """Kill the process, and wait until it is gone."""
        with contextlib.suppress(TimeoutError):
            await process.end(self._job.limits.kill_timeout_s)


def _parsed(said: str | None) -> dict[str, Any] | None:
    if said is None:
        return None
    try:
        value: Any = json.loads(said)
    except ValueError:
        return None
    return cast("dict[str, Any]", value) if isinstance(value, dict) else None


class Verdict(NamedTuple):
    """A reward, or the failure in place of one."""

    reward: float | None
    cause: str
    metrics: Mapping[str, float] = NOTHING
    failure: Failure | None = None


def failed(kind: FailureKind, text: str) -> Verdict:
    return Verdict(None, "failed", failure=Failure(kind, text))


def late(seconds: float) -> Verdict:
    """The verdict on an episode that was killed ``seconds`` after its time was over."""
    text = f"the environment did not end within the episode's time and {seconds:g} s more: it hangs"
    return Verdict(None, "time", failure=Failure(FailureKind.NO_RESULT, text))


def verdict_on(ended: Ended) -> Verdict:
    """The verdict on an episode whose process has ended by itself."""
    if ended.code is None:
        return failed(FailureKind.INFRASTRUCTURE, "the process that the episode was forked from has died")
    if ended.said is None:
        return failed(*_ended_silently(ended.code))
    try:
        return _said(ended.said)
    except (KeyError, TypeError, ValueError) as error:
        return failed(FailureKind.NO_RESULT, f"its process gave a result that is malformed: {error!r}")


def _said(said: dict[str, Any]) -> Verdict:
    if "failed" in said:
        return failed(FailureKind(said["kind"]), str(said["failed"]))
    reward = float(said["reward"])
    if not math.isfinite(reward):
        raise ValueError(f"the reward is {reward}")
    return Verdict(reward, str(said["cause"]), {str(name): float(value) for name, value in said["metrics"].items()})


def _ended_silently(code: int) -> tuple[FailureKind, str]:
    if code in _OUTSIDE:
        name = signal.Signals(code - 128).name
        return FailureKind.INFRASTRUCTURE, f"its process was ended from outside ({name}), perhaps for lack of memory"
    if code > 128:
        try:
            return FailureKind.NO_RESULT, f"its process crashed ({signal.Signals(code - 128).name})"
        except ValueError:
            pass
    return FailureKind.NO_RESULT, f"its process ended without a result, with exit code {code}"
