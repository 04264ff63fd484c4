"""A pool of task processes under deadlines: some score responses, one reads prompts.

    batch ─┬─▶ a free process of those that score one by one ──▶ verdicts ─┬─▶ their weighted sum
           ├─▶ a free process of a reward that scores batches ─▶ verdicts ─┤
           └─▶ …                                             of another ───┘

Invariants
- Every response gets exactly one verdict: a reward or a reason, never both. If one of several rewards is missing, the
  verdict is a reason.
- ``workers`` processes score one by one, with all rewards that do so. Each ``http`` reward has ``workers`` processes of
  its own, each ``model`` reward one, so that a user's verifier that kills its process unloads no reward model.
- One more process reads prompts. It runs no verifier's code, and waits for no verifier. A process serves one batch at a
  time, under the deadlines of ``scorer_handle.py``.
- A process scores nothing before it was tried on the first row (``trial.py``), which may take
  ``limits.first_verdict_s``; if one hangs or dies in its trial, no later one of its group is tried.
- A process is free again only when its exchange is over: an asker that leaves does not leave frames for the next one.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from actors.environments.errors import ScorerBroken
from actors.environments.scoring.scorer_frames import ScorerVerdict
from actors.environments.scoring.scorer_handle import Item, ScorerHandle, Trial
from configs.schema import JobConfig
from configs.task_schema import RewardConfig

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class _Group:
    """Holds the processes that score the same rewards of a job."""

    parts: list[int]
    """Indices of the rewards in ``RewardConfig.each``."""
    workers: int
    trial: Trial
    free: asyncio.Queue[ScorerHandle]


def _groups(reward: RewardConfig) -> list[_Group]:
    """One group for all rewards that are scored one by one, and one for each of the others."""
    single = [i for i, (_, one) in enumerate(reward.each) if not one.batched]
    found = [(single, reward.workers)] if single else []
    for i, (_, one) in enumerate(reward.each):
        if one.batched:
            found.append(([i], reward.workers if one.kind == "http" else 1))
    return [_Group(parts, workers, Trial(), asyncio.Queue(workers)) for parts, workers in found]


class ScorerPool:
    """Scores batches in processes of its own. If ``model`` names a directory with a tokenizer, one more reads prompts.

    ``run_dir``: directory in which the reading process keeps which rows it has seen.
    """

    def __init__(
        self, job: JobConfig, log: Path | None = None, model: Path | None = None, run_dir: Path | None = None
    ) -> None:
        self._job = job
        self._order = {
            "job": job.model_dump_json(),
            "model": str(model or ""),
            "run_dir": str(run_dir or ""),
            "policy": str(model or ""),
            "rows": model is not None,
            "parts": [],
        }
        self._log = log
        self._groups = _groups(job.reward)
        self._free_reader: asyncio.Queue[ScorerHandle] = asyncio.Queue(1)
        self._all: list[ScorerHandle] = []
        self._exchanges: list[asyncio.Task[Any]] = []
        self._closed = False

    @property
    def warnings(self) -> list[str]:
        """Texts for people, of a verifier that was called once and may have a fault."""
        return [warning for group in self._groups for warning in group.trial.warnings]

    async def start(self) -> None:
        """Start every process and wait until each has its scorer and has tried it once.

        Raises:
            RewardRefused: the scorer cannot be made (import error, unknown task), or can only fail; says why.
            SourceUnreadable: the data set, its first row, or the tokenizer cannot be read; says where.
            ScorerBroken: a process did not get ready.
        """
        scorers = [(group, self._scorer_of(group)) for group in self._groups for _ in range(group.workers)]
        readers = [ScorerHandle(self._job, self._order, self._log, None)] if self._order["model"] else []
        self._all = [*(process for _, process in scorers), *readers]
        self._exchanges = [asyncio.create_task(process.start()) for process in self._all]
        try:
            await asyncio.gather(*self._exchanges)
        except BaseException:
            await self.close()  # if one cannot start, the others are not left behind
            raise
        self._exchanges.clear()
        for group, process in scorers:
            group.free.put_nowait(process)
        for process in readers:
            self._free_reader.put_nowait(process)

    def _scorer_of(self, group: _Group) -> ScorerHandle:
        order = self._order | {"model": "", "parts": group.parts}
        return ScorerHandle(self._job, order, self._log, group.trial if order["rows"] else None)

    async def score(self, items: Sequence[Item]) -> list[ScorerVerdict]:
        """One verdict per item, in order.

        Raises:
            RewardRefused: a remote scorer has said that it will never answer.
        """
        found = await asyncio.gather(
            *(self._exchange(group.free, lambda process: process.score(items)) for group in self._groups)
        )
        if len(found) == 1:
            return found[0]
        return [self._sum_of(verdicts) for verdicts in zip(*found, strict=True)]

    def _sum_of(self, verdicts: Sequence[ScorerVerdict]) -> ScorerVerdict:
        """The weighted sum of the groups' verdicts on one response."""
        if missing := [verdict.reason for verdict in verdicts if verdict.reward is None]:
            return ScorerVerdict(None, missing[0])
        values: dict[int, float] = {}
        for group, verdict in zip(self._groups, verdicts, strict=True):
            values |= zip(group.parts, verdict.parts, strict=True)
        parts = tuple(values[i] for i in range(len(values)))
        total = math.fsum(one.weight * value for one, value in zip(self._job.reward.parts, parts, strict=True))
        if not math.isfinite(total):
            return ScorerVerdict(None, f"reward.parts: their weighted sum is {total}; expected a finite number")
        return ScorerVerdict(total, "", parts, any(verdict.cut for verdict in verdicts))

    async def read(self, start: int, count: int, *, evaluation: bool = False) -> dict[str, Any]:
        """Read prompts of training, or of the evaluation, as ``PromptStream.read``, for about ``limits.read_slice_s``.

        Raises:
            SourceUnreadable: the data set cannot be read, now or later; says where.
            ScorerBroken, ScorerTimedOut: the process failed, or the machine; ask again.
        """
        what = "read_evaluation" if evaluation else "read"
        return await self._exchange(self._free_reader, lambda process: process.read(**{what: (start, count)}))

    async def answers(self, contexts: Sequence[bytes]) -> list[str]:
        """The right answer of each row, as text for people. Raises as ``read`` does."""
        return (await self._exchange(self._free_reader, lambda process: process.read(answers=contexts)))["answers"]

    async def _exchange(
        self, free: asyncio.Queue[ScorerHandle], work: Callable[[ScorerHandle], Coroutine[Any, Any, _T]]
    ) -> _T:
        """The result of ``work`` with a ``free`` process; when the caller is cancelled, the work goes on to its end."""
        process = await free.get()  # without a deadline: a slow verifier is not broken, and the asker has one
        if self._closed:
            free.put_nowait(process)  # the next one that waits learns the same
            raise ScorerBroken("the pool is closed")
        exchange, over = asyncio.create_task(work(process)), asyncio.get_running_loop().create_future()
        self._exchanges.append(exchange)
        exchange.add_done_callback(lambda _: self._release(free, process, exchange))
        exchange.add_done_callback(lambda _: over.done() or over.set_result(None))
        await over  # not the task itself, which must go on when this call is cancelled
        if exchange.cancelled():
            raise ScorerBroken("the pool was closed meanwhile")
        return exchange.result()

    def _release(self, free: asyncio.Queue[ScorerHandle], process: ScorerHandle, exchange: asyncio.Task[Any]) -> None:
        self._exchanges.remove(exchange)
        free.put_nowait(process)
        if not exchange.cancelled():
            exchange.exception()  # marked as retrieved: its asker may have gone

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
