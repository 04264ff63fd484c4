"""A pool of task processes under deadlines: some score responses, one reads prompts.

    batch ──▶ a free process ──▶ verdicts, gathered; no frame later than reward.timeout_s
                   │ none in time, or the process died
                   ▼
              kill it, start another; it scores the rest again, one verdict a frame
                   │ again: now we know which response it was
                   ▼
              kill it; that response has no result; the rest of the batch goes on, gathered

Invariants
- Every response gets exactly one verdict: a reward or a reason, never both.
- At most ``workers`` processes score, and one of its own reads: it alone holds a tokenizer, no verifier's code runs in
  it, and it waits for none. A process serves one batch at a time.
- A process scores nothing before it was tried on the first row (``trial.py``), which may take
  ``limits.first_verdict_s``; if one hangs or dies in that, none is tried again.
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

from actors.environments.errors import RewardRefused, ScorerBroken, ScorerTimedOut, SourceUnreadable
from actors.environments.scoring.scorer_process import frame
from actors.environments.scoring.trial import CALLED
from actors.host.bounded_file import trim
from actors.host.python_path import python_path
from configs.schema import JobConfig

_T = TypeVar("_T")
_Item = tuple[str, bytes]
"""Response, and the context that its prompt was issued with (``examples.py``)."""


@dataclass(frozen=True, slots=True)
class PoolVerdict:
    """Holds a reward or, if that is None, why there is none."""

    reward: float | None
    reason: str = ""
    parts: tuple[float, ...] = ()
    """Rewards that it is the weighted sum of, where the job has several."""


class ScorerPool:
    """Scores batches in processes of its own. With a ``model`` directory (its tokenizer) one more reads prompts.

    ``run_dir``: where they keep what they have seen of the data set.
    """

    def __init__(
        self, job: JobConfig, log: Path | None = None, model: Path | None = None, run_dir: Path | None = None
    ) -> None:
        self._job = job
        self._order = {
            "job": job.model_dump_json(),
            "model": str(model or ""),
            "run_dir": str(run_dir or ""),
            "rows": model is not None,
        }
        self._log = log
        self._free: asyncio.Queue[_ScorerProcess] = asyncio.Queue(job.reward.workers)
        self._free_reader: asyncio.Queue[_ScorerProcess] = asyncio.Queue(1)
        self._all: list[_ScorerProcess] = []
        self._exchanges: list[asyncio.Task[Any]] = []
        self._closed = False
        self._trial = _Trial()

    @property
    def warnings(self) -> list[str]:
        """What people are to be told of the verifier: it was called once, and may not be in order."""
        return self._trial.warnings

    async def start(self) -> None:
        """Start every process and wait until each has its scorer, which was called once.

        Raises:
            RewardRefused: the scorer cannot be made (import error, unknown task), or can only fail; says why.
            SourceUnreadable: the data set, its first row, or the tokenizer cannot be read; says where.
            ScorerBroken: a process did not get ready.
        """
        scores = self._order | {"model": ""}
        trial = self._trial if scores["rows"] else None
        scorers = [_ScorerProcess(self._job, scores, self._log, trial) for _ in range(self._job.reward.workers)]
        readers = [_ScorerProcess(self._job, self._order, self._log, None)] if self._order["model"] else []
        self._all = [*scorers, *readers]
        self._exchanges = [asyncio.create_task(process.start()) for process in self._all]
        try:
            await asyncio.gather(*self._exchanges)
        except BaseException:
            await self.close()  # one that cannot start leaves no others behind
            raise
        self._exchanges.clear()
        for process in scorers:
            self._free.put_nowait(process)
        for process in readers:
            self._free_reader.put_nowait(process)

    async def score(self, items: Sequence[_Item]) -> list[PoolVerdict]:
        """One verdict per item, in order."""
        return await self._exchange(self._free, lambda process: process.score(items))

    async def read(self, start: int, count: int) -> dict[str, Any]:
        """Read prompts, as ``PromptStream.read`` does, for about ``limits.read_slice_s``.

        Raises:
            SourceUnreadable: the data set cannot be read, now or later; says where.
            ScorerBroken, ScorerTimedOut: the process failed, or the machine; ask again.
        """
        return await self._exchange(self._free_reader, lambda process: process.read(read=(start, count)))

    async def answers(self, contexts: Sequence[bytes]) -> list[str]:
        """The right answer of each row, as text for people. Raises as ``read`` does."""
        return (await self._exchange(self._free_reader, lambda process: process.read(answers=contexts)))["answers"]

    async def _exchange(
        self, free: asyncio.Queue[_ScorerProcess], work: Callable[[_ScorerProcess], Coroutine[Any, Any, _T]]
    ) -> _T:
        """What ``work`` gets out of a ``free`` process. It goes on to its end when the caller is cancelled."""
        process = await free.get()  # however long: a slow verifier is no broken one, and the asker has a deadline
        if self._closed:
            free.put_nowait(process)  # whoever waits behind us learns the same
            raise ScorerBroken("the pool is closed")
        exchange, over = asyncio.create_task(work(process)), asyncio.get_running_loop().create_future()
        self._exchanges.append(exchange)
        exchange.add_done_callback(lambda _: self._release(free, process, exchange))
        exchange.add_done_callback(lambda _: over.done() or over.set_result(None))
        await over  # and not the task itself, which is left alone when we are cancelled
        if exchange.cancelled():
            raise ScorerBroken("the pool was closed meanwhile")
        return exchange.result()

    def _release(
        self, free: asyncio.Queue[_ScorerProcess], process: _ScorerProcess, exchange: asyncio.Task[Any]
    ) -> None:
        self._exchanges.remove(exchange)
        free.put_nowait(process)
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


class _Trial:
    """It is what all processes of a pool know of trying the verifier."""

    def __init__(self) -> None:
        self.harmless = True
        """Whether no process hung or died when it tried."""
        self.warnings: list[str] = []

    def warn(self, text: str) -> None:
        if text not in self.warnings:
            self.warnings.append(text)


class _ScorerProcess:
    """Drives one process, which is started again by ``score`` when it had to be killed."""

    def __init__(self, job: JobConfig, order: dict[str, Any], log: Path | None, trial: _Trial | None) -> None:
        self._job = job
        self._order = order
        self._log = log
        self._trial = trial
        self._process: asyncio.subprocess.Process | None = None

    async def start(self) -> None:
        await self._exec()
        if (trial := self._trial) is None or not trial.harmless:
            return
        patience_s = max(self._job.limits.first_verdict_s, self._job.reward.timeout_s)
        try:
            await self._send({"try": True})
            reply = await self._receive(patience_s)
        except (ScorerTimedOut, ScorerBroken) as error:
            trial.harmless = False
            trial.warn(f"the verifier, {CALLED}: {error}")
            await self.kill()
            await self._exec()
            return
        await self._check(reply)
        for warning in reply["warnings"]:
            trial.warn(warning)

    async def _check(self, reply: dict[str, Any]) -> None:
        """Raise what makes the process useless."""
        if "broken" in reply:
            await self.kill()
            raise self._error_of(reply)

    def _error_of(self, reply: dict[str, Any]) -> SourceUnreadable | ScorerBroken:
        """What a process says of why it cannot do as it was asked."""
        if reply["data"]:
            return SourceUnreadable(reply["broken"])
        return (ScorerBroken if self._order["model"] else RewardRefused)(reply["broken"])

    async def _exec(self) -> None:
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
        await self._send(self._order)
        try:
            reply = await self._receive(self._job.limits.ready_timeout_s)
        except (ScorerTimedOut, ScorerBroken) as error:
            await self.kill()
            raise ScorerBroken(f"the scorer process did not get ready: {error}") from error
        await self._check(reply)

    def _open_log(self) -> IO[bytes] | None:
        return self._log.open("ab") if self._log else None

    def _trim_log(self) -> None:
        """Keep what verifiers print within bounds: with each frame, for a loop of prints fills a disk in seconds."""
        if self._log is not None:
            with contextlib.suppress(OSError):
                trim(self._log, self._job.limits.process_log_max_bytes)

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

    async def read(self, **request: Sequence[object]) -> dict[str, Any]:
        """What a process that reads says to ``request``."""
        if self._process is None:
            await self.start()
        try:
            await self._send(request)
            reply = await self._receive(self._job.limits.read_timeout_s)
        except (ScorerTimedOut, ScorerBroken):
            await self.kill()
            raise
        if "broken" in reply:
            raise self._error_of(reply)
        return reply

    async def _score_into(self, verdicts: list[PoolVerdict], items: Sequence[_Item], *, gather: bool) -> None:
        """Append the verdicts of ``items``, in order, as they come.

        Raises:
            ScorerTimedOut, ScorerBroken: the rest will not come.
        """
        wanted = len(verdicts) + len(items)
        await self._send({"score": items, "gather_s": self._job.limits.score_gather_s if gather else 0.0})
        while len(verdicts) < wanted:
            try:
                gathered = await self._receive(self._job.reward.timeout_s)
            except ScorerTimedOut as error:
                raise ScorerTimedOut(f"no verdict within reward.timeout_s ({self._job.reward.timeout_s} s)") from error
            self._trim_log()
            verdicts += [PoolVerdict(reward, reason, tuple(parts)) for reward, reason, parts in gathered]

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
            with contextlib.suppress(TimeoutError):  # its exit follows its last words
                async with asyncio.timeout(self._job.limits.close_timeout_s):
                    await process.wait()
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
