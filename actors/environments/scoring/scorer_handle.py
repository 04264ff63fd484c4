"""One process of the pool, from the outside: started, asked, killed when it is late, and started again.

    batch ──▶ the process ──▶ verdicts, gathered; no frame later than reward.timeout_s
                   │ none in time, or the process died
                   ▼
              kill it, start another; it scores the rest again, one verdict a frame
                   │ again: now we know which response it was
                   ▼
              kill it; that response has no result; the rest of the batch goes on, gathered

A process that scores batches has ``limits.batch_answer_s`` more, to say itself why it has no verdict in time.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import msgpack

from actors.environments.errors import RewardRefused, ScorerBroken, ScorerTimedOut, SourceUnreadable
from actors.environments.scoring.scorer_frames import ScorerVerdict, frame
from actors.environments.scoring.trial import CALLED
from actors.host.bounded_file import trim
from actors.host.helper_process import HelperProcess
from configs.schema import JobConfig

Item = tuple[str, bytes]
"""Response, and the context that its prompt was issued with (``examples.py``)."""


class Trial:
    """Holds what the processes that score the same rewards have found by trying the verifier."""

    def __init__(self) -> None:
        self.harmless = True
        """Whether no process has hung or died in its trial."""
        self.warnings: list[str] = []

    def warn(self, text: str) -> None:
        if text not in self.warnings:
            self.warnings.append(text)


class ScorerHandle:
    """Drives one process; ``score`` and ``read`` start it again after it had to be killed."""

    def __init__(self, job: JobConfig, order: dict[str, Any], log: Path | None, trial: Trial | None) -> None:
        self._job = job
        batched = any(reward.batched for i, (_, reward) in enumerate(job.reward.each) if i in order["parts"])
        self._patience_s = job.reward.timeout_s + (job.limits.batch_answer_s if batched else 0.0)
        self._order = order
        self._log = log
        self._trial = trial
        self._process: HelperProcess | None = None

    async def start(self) -> None:
        await self._exec()
        if (trial := self._trial) is None or not trial.harmless:
            return
        patience_s = max(self._job.limits.first_verdict_s, self._patience_s)
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
        """Kill the process and raise, if the reply says that it is of no use."""
        if "broken" in reply:
            await self.kill()
            raise self._error_of(reply)

    def _error_of(self, reply: dict[str, Any]) -> SourceUnreadable | ScorerBroken:
        if reply["data"]:
            return SourceUnreadable(reply["broken"])
        return (ScorerBroken if self._order["model"] else RewardRefused)(reply["broken"])

    async def _exec(self) -> None:
        self._process = await HelperProcess.start("actors.environments.scoring.scorer_process", self._log)
        await self._send(self._order)
        try:
            reply = await self._receive(self._job.limits.ready_timeout_s)
        except (ScorerTimedOut, ScorerBroken) as error:
            await self.kill()
            raise ScorerBroken(f"the scorer process did not get ready: {error}") from error
        await self._check(reply)

    def _trim_log(self) -> None:
        """Bound what verifiers print; called for each frame, since a loop of prints fills a disk in seconds."""
        if self._log is not None:
            with contextlib.suppress(OSError):
                trim(self._log, self._job.limits.process_log_max_bytes)

    async def score(self, items: Sequence[Item]) -> list[ScorerVerdict]:
        verdicts: list[ScorerVerdict] = []
        gather = True
        while len(verdicts) < len(items):
            if self._process is None:
                await self.start()
            rest = items[len(verdicts) :]
            try:
                await self._score_into(verdicts, rest, gather=gather)
            except RewardRefused:
                raise  # the next process would refuse again
            except (ScorerTimedOut, ScorerBroken) as error:
                await self.kill()
                if not gather or len(rest) == 1:
                    verdicts.append(ScorerVerdict(None, str(error)))
                gather = not gather
        return verdicts

    async def read(self, **request: Sequence[object]) -> dict[str, Any]:
        """Send ``request`` to the process, which reads prompts; returns its answer."""
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

    async def _score_into(self, verdicts: list[ScorerVerdict], items: Sequence[Item], *, gather: bool) -> None:
        """Append the verdicts of ``items``, in order, as they come.

        Raises:
            ScorerTimedOut, ScorerBroken: the rest will not come.
            RewardRefused: no verdict will come, however often the process is asked.
        """
        wanted = len(verdicts) + len(items)
        await self._send({"score": items, "gather_s": self._job.limits.score_gather_s if gather else 0.0})
        while len(verdicts) < wanted:
            try:
                gathered = await self._receive(self._patience_s)
            except ScorerTimedOut as error:
                raise ScorerTimedOut(f"no verdict within reward.timeout_s ({self._job.reward.timeout_s} s)") from error
            self._trim_log()
            if isinstance(gathered, dict):
                await self._check(cast("dict[str, Any]", gathered))
            verdicts += [ScorerVerdict(reward, reason, tuple(parts), cut) for reward, reason, parts, cut in gathered]

    async def _send(self, value: object) -> None:
        process = self._running()
        try:
            await process.feed(frame(value), self._job.limits.ready_timeout_s)
        except (ConnectionError, TimeoutError) as error:
            raise ScorerBroken(f"the scorer process takes no input: {error}") from error

    async def _receive(self, timeout_s: float) -> Any:
        process = self._running()
        try:
            async with asyncio.timeout(timeout_s):
                head = await process.exactly(4)
                return msgpack.unpackb(await process.exactly(int.from_bytes(head, "big")))
        except TimeoutError as error:
            raise ScorerTimedOut(f"no answer within {timeout_s} s") from error
        except (asyncio.IncompleteReadError, ConnectionError) as error:
            with contextlib.suppress(TimeoutError):  # the exit follows the end of its output
                await process.reaped(self._job.limits.close_timeout_s)
            raise ScorerBroken(f"the scorer process died (exit code {process.exit_code})") from error

    def _running(self) -> HelperProcess:
        if self._process is None:
            raise ScorerBroken("the scorer process is not running")
        return self._process

    async def kill(self) -> None:
        process, self._process = self._process, None
        if process is not None:  # its guard gets the signal, and kills the scorer and all it has started
            await process.end(self._job.limits.stop_timeout_s, signal.SIGTERM)
