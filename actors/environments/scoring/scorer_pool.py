"""A pool of task processes under deadlines: they score responses and read prompts.

    batch ──▶ a free process ──▶ verdicts, gathered; no frame later than reward.timeout_s
                   │ none in time, or the process died
                   ▼
              kill it, start another; it scores the rest again, one verdict a frame
                   │ again: now we know which response it was
                   ▼
              kill it; that response has no result; the rest of the batch goes on, gathered

Invariants
- Every response gets exactly one verdict: a reward or a reason, never both.
- At most ``workers`` processes; a process serves one batch at a time.
- A process is free again only when its exchange is over: an asker that goes away leaves no frames for the next one.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, TypeVar

import msgpack

from actors.environments.errors import ScorerBroken, ScorerTimedOut, SourceUnreadable
from actors.environments.scoring.scorer_process import frame
from actors.host.python_path import python_path
from configs.schema import JobConfig

_T = TypeVar("_T")
_Item = tuple[str, Any, str, int, dict[str, Any]]
"""Response, prompt, answer, index, further columns."""


@dataclass(frozen=True, slots=True)
class PoolVerdict:
    """Holds a reward or, if that is None, why there is none."""

    reward: float | None
    reason: str = ""


class ScorerPool:
    """Scores batches in processes of its own. With a ``model`` directory (its tokenizer) they read prompts as well."""

    def __init__(self, job: JobConfig, log: Path | None = None, model: Path | None = None) -> None:
        self._job = job
        self._log = log
        self._model = model
        self._free: asyncio.Queue[_ScorerProcess] = asyncio.Queue(job.reward.workers)
        self._all: list[_ScorerProcess] = []
        self._exchanges: list[asyncio.Task[Any]] = []
        self._closed = False

    async def start(self) -> None:
        """Start every process and wait until each has its scorer.

        Raises:
            ScorerBroken: the scorer cannot be made (import error, unknown task); says why.
        """
        self._all = [_ScorerProcess(self._job, self._log, self._model) for _ in range(self._job.reward.workers)]
        await asyncio.gather(*(process.start() for process in self._all))
        for process in self._all:
            self._free.put_nowait(process)

    async def score(self, items: Sequence[_Item]) -> list[PoolVerdict]:
        """One verdict per item, in order."""
        return await self._exchange(lambda process: process.score(items))

    async def read(self, start: int, count: int) -> dict[str, Any]:
        """Read prompts, as ``PromptStream.read`` does.

        Raises:
            SourceUnreadable: the data set cannot be read; says where.
            ScorerBroken, ScorerTimedOut: the process failed; ask again.
        """
        return await self._exchange(lambda process: process.read(start, count))

    async def _exchange(self, work: Callable[[_ScorerProcess], Coroutine[Any, Any, _T]]) -> _T:
        """What ``work`` gets out of a free process. It goes on to its end when the caller is cancelled."""
        process = await self._free.get()  # however long: a slow verifier is no broken one, and the asker has a deadline
        if self._closed:
            self._free.put_nowait(process)  # whoever waits behind us learns the same
            raise ScorerBroken("the pool is closed")
        exchange, over = asyncio.create_task(work(process)), asyncio.get_running_loop().create_future()
        self._exchanges.append(exchange)
        exchange.add_done_callback(lambda _: self._release(process, exchange))
        exchange.add_done_callback(lambda _: over.done() or over.set_result(None))
        await over  # and not the task itself, which is left alone when we are cancelled
        if exchange.cancelled():
            raise ScorerBroken("the pool was closed meanwhile")
        return exchange.result()

    def _release(self, process: _ScorerProcess, exchange: asyncio.Task[Any]) -> None:
        self._exchanges.remove(exchange)
        self._free.put_nowait(process)
        if not exchange.cancelled():
            exchange.exception()  # its asker may have gone: then nobody else looks at it

    async def close(self) -> None:
        self._closed = True
        exchanges = list(self._exchanges)
        for exchange in exchanges:
            exchange.cancel()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._job.limits.stop_timeout_s):
                await asyncio.gather(*exchanges, return_exceptions=True)
        for process in self._all:
            await process.kill()


class _ScorerProcess:
    """Drives one process, which is started again by ``score`` when it had to be killed."""

    def __init__(self, job: JobConfig, log: Path | None, model: Path | None) -> None:
        self._job = job
        self._log = log
        self._model = model
        self._process: asyncio.subprocess.Process | None = None

    async def start(self) -> None:
        errors = self._open_log()
        try:
            command = (sys.executable, "-P", "-m", "actors.environments.scoring.scorer_process")
            pipe = asyncio.subprocess.PIPE
            env = {**os.environ, "PYTHONPATH": python_path()}
            self._process = await asyncio.create_subprocess_exec(
                *command, stdin=pipe, stdout=pipe, stderr=errors, start_new_session=True, env=env
            )
        finally:
            if errors is not None:
                errors.close()
        await self._send({"job": self._job.model_dump_json(), "model": str(self._model or "")})
        try:
            reply = await self._receive(self._job.limits.ready_timeout_s)
        except (ScorerTimedOut, ScorerBroken) as error:
            await self.kill()
            raise ScorerBroken(f"the scorer process did not get ready: {error}") from error
        if "broken" in reply:
            await self.kill()
            raise ScorerBroken(reply["broken"])

    def _open_log(self) -> IO[bytes] | None:
        return self._log.open("ab") if self._log else None

    async def score(self, items: Sequence[_Item]) -> list[PoolVerdict]:
        verdicts: list[PoolVerdict] = []
        gather = True
        while len(verdicts) < len(items):
            if self._process is None:
                await self.start()
            rest = items[len(verdicts) :]
            try:
                await self._score_into(verdicts, rest, gather=gather)
            except (ScorerTimedOut, ScorerBroken) as error:
                await self.kill()
                if not gather or len(rest) == 1:
                    verdicts.append(PoolVerdict(None, str(error)))
                gather = not gather
        return verdicts

    async def read(self, start: int, count: int) -> dict[str, Any]:
        if self._process is None:
            await self.start()
        try:
            await self._send({"read": [start, count]})
            reply = await self._receive(self._job.limits.read_timeout_s)
        except (ScorerTimedOut, ScorerBroken):
            await self.kill()
            raise
        if "broken" in reply:
            raise SourceUnreadable(reply["broken"])
        return reply

    async def _score_into(self, verdicts: list[PoolVerdict], items: Sequence[_Item], *, gather: bool) -> None:
        """Append the verdicts of ``items``, in order, as they come.

        Raises:
            ScorerTimedOut, ScorerBroken: the rest will not come.
        """
        wanted = len(verdicts) + len(items)
        await self._send({"score": items, "gather_s": self._job.limits.score_gather_s if gather else 0.0})
        while len(verdicts) < wanted:
            gathered = await self._receive(self._job.reward.timeout_s)
            verdicts += [PoolVerdict(reward, reason) for reward, reason in gathered]

    async def _send(self, value: object) -> None:
        process = self._running()
        assert process.stdin is not None
        try:
            process.stdin.write(frame(value))
            async with asyncio.timeout(self._job.limits.ready_timeout_s):
                await process.stdin.drain()
        except (ConnectionError, TimeoutError) as error:
            raise ScorerBroken(f"the scorer process takes no input: {error}") from error

    async def _receive(self, timeout_s: float) -> Any:
        process = self._running()
        assert process.stdout is not None
        try:
            async with asyncio.timeout(timeout_s):
                head = await process.stdout.readexactly(4)
                return msgpack.unpackb(await process.stdout.readexactly(int.from_bytes(head, "big")))
        except TimeoutError as error:
            raise ScorerTimedOut(f"no answer within {timeout_s} s") from error
        except (asyncio.IncompleteReadError, ConnectionError) as error:
            raise ScorerBroken(f"the scorer process died (exit code {process.returncode})") from error

    def _running(self) -> asyncio.subprocess.Process:
        if self._process is None:
            raise ScorerBroken("the scorer process is not running")
        return self._process

    async def kill(self) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        with contextlib.suppress(ProcessLookupError):
            process.terminate()  # its guard: it kills the scorer and what its verifiers have started
        async with asyncio.timeout(self._job.limits.stop_timeout_s):
            await process.wait()
        if process.stdin is not None:
            process.stdin.close()
