"""The leader's side of the sharded backend: rank 0 of a world, one device per rank, any Hugging Face causal LM.

    accumulate   micro-batch ─ a part for each rank ─▶ followers and our own core, at once ─▶ statistics, added in order
    step         all ranks ─▶ one result, which all of them must have
    export       room for the segment ─▶ every rank writes its rows ─▶ hashed, whole under its name
    save         every rank writes its file ─▶ backend.json

Invariants
- A call is answered when all ranks have done their part. If one fails, so does the call, and the group's life is over:
  also when a rank finds no memory in the middle of a pass, since the others wait for it in an exchange.
- Which rank computes what depends only on the micro-batch and the number of ranks: the same number gives the same bits.
- Checkpoints, and versions of ranks on one machine, are the leader's files. Ranks of the first replica write into them,
  or give what they hold to the leader if they are on another machine (``World.elsewhere``) and do not see the file.
- A version of ranks on several machines is a file on each (``machine_shares.py``).
- A torch error that a lost rank may have caused becomes RankLost, whichever rank raised it.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, Final, TypeVar

import msgspec
import numpy as np
import torch.distributed as dist

from actors.core.context import Context
from actors.core.watch import Down
from actors.protocol import training
from actors.protocol.weights import Manifest
from actors.ranks.errors import RankLost
from actors.ranks.followers import NOBODY, Followers
from actors.trainer.backend import (
    LOOPBACK,
    NO_STATS,
    AdamStep,
    BackendSpec,
    Learned,
    LocalBackend,
    LossSpec,
    MemoryUse,
    MicroBatch,
    MicroBatchStats,
    StepResult,
    StoredBytes,
    summed,
)
from actors.trainer.backends.fsdp import files, machine_shares
from actors.trainer.backends.fsdp.core import FsdpCore
from actors.trainer.backends.fsdp.orders import (
    Begin,
    Begun,
    FsdpAnswer,
    FsdpOrder,
    Measure,
    Measured,
    Meeting,
    Sealed,
    SealShare,
    UseRecompute,
    WriteRows,
    WriteShare,
    decode_answer,
    encode,
    is_failure,
    nothing,
    remove_meeting,
)
from actors.trainer.backends.fsdp.world import open_store
from actors.trainer.backends.remote_errors import error_of
from actors.trainer.backends.segment_file import VersionWriter, described
from actors.trainer.backends.torch.causal_lm import check_batch, response_positions
from actors.trainer.backends.torch.critic import judgement
from actors.trainer.backends.torch.replicas import learned_of, rows_of, shares
from actors.trainer.errors import BackendClosed, MicroBatchTooLarge
from actors.weights.memory import partial_path
from configs.limits import Limits

R = TypeVar("R")
A = TypeVar("A", bound=FsdpAnswer)

_AROUND_AN_ORDER_BYTES: Final = 1024
"""Bytes that a message has at most besides the order in it."""


class FsdpBackend(LocalBackend):
    """Implements ``TrainBackend``; see there for the promises."""

    kind = files.KIND

    def __init__(
        self,
        followers: Followers = NOBODY,
        limits: Limits | None = None,
        *,
        replicas: int = 1,
        context: int = 1,
        offload: bool = False,
        host: str = LOOPBACK,
    ) -> None:
        """``followers``: the other ranks. ``host``: address by which they reach this machine."""
        self._followers = followers
        self._limits = limits or Limits()
        self._replicas = replicas
        self._context = context
        self._offload = offload
        self._host = host
        self._thread: ThreadPoolExecutor | None = None
        self._own: Future[Any] | None = None
        """The newest of our own parts."""
        self._core: FsdpCore | None = None
        self._model_path = Path()
        self._meeting: Meeting | None = None
        self._segments = VersionWriter()
        self._failed = ""
        """Error of a rank that has ended the group's life; empty: none has failed."""

    @property
    def _size(self) -> int:
        return 1 + self._followers.count

    def connect(self, ctx: Context) -> None:
        self._followers.connect(ctx)

    def heard(self, message: Down) -> None:
        self._followers.heard(message)

    async def start(self, spec: BackendSpec, *, checkpoint_step: int = 0) -> None:
        self._thread = ThreadPoolExecutor(1, "train")
        self._model_path = spec.model_path
        timeout_s = self._limits.train_step_timeout_s
        unplaced = Meeting("", self._host, 0, self._size, self._replicas, self._context, self._offload, timeout_s)
        store, meeting = await self._run(open_store, unplaced)
        self._meeting = meeting
        begin = Begin(spec.as_json(), meeting)

        def make_core() -> None:
            self._core = FsdpCore(spec, meeting, 0, store)  # at once, so that ``close`` ends it if another rank fails

        await self._together(make_core, begin, Begun, self._limits.ready_timeout_s)

    def stored_bytes(self) -> StoredBytes:
        core, whole = self._open, self._open.policy.rows.total_bytes
        numbers = core.policy.numbers + (0 if core.critic is None else core.critic.numbers)
        here = whole if len(core.world.machines) == 1 else machine_shares.here_bytes(core.policy.rows, core.world)
        return StoredBytes(segment=here, checkpoint=3 * 4 * numbers + 2 * whole)

    # ------------------------------------------------------------ computing

    async def score(self, batch: MicroBatch, *, temperature: float, reference: bool) -> np.ndarray:
        core = self._open
        return await self._of_each_token(
            batch,
            lambda part: core.score(part, temperature, reference),
            lambda part: training.ScoreCall(part, temperature, reference),
            training.TokensScored,
        )

    async def values(self, batch: MicroBatch) -> np.ndarray:
        return await self._of_each_token(batch, self._open.values, training.ValuesCall, training.Valued)

    async def _of_each_token(
        self,
        batch: MicroBatch,
        work: Callable[[MicroBatch], np.ndarray],
        order: Callable[[MicroBatch], FsdpOrder],
        kind: type[training.TokensScored | training.Valued],
    ) -> np.ndarray:
        """One number for each token, float32[B, T], put together from the parts of all ranks."""
        check_batch(batch, response_positions(batch))
        cuts = self._cuts(batch)
        mine, *others = self._parts(batch, cuts)
        own, answers = await self._together(
            partial(work, mine), [order(part) for part in others], kind, self._limits.train_step_timeout_s
        )
        found = [
            own,
            *(answer.logprobs if isinstance(answer, training.TokensScored) else answer.values for answer in answers),
        ]
        result = np.zeros(batch.input_ids.shape, dtype=np.float32)
        for rows, numbers in zip(cuts, self._one_of_each(found), strict=False):
            result[rows, : numbers.shape[1]] = numbers
        return result

    async def accumulate(self, batch: MicroBatch, loss: LossSpec) -> MicroBatchStats:
        check_batch(batch, batch.loss_weight != 0)
        core, (mine, *others) = self._open, self._parts(batch, self._cuts(batch))
        if core.critic is not None:
            judgement(batch)
        self._segments.make_room()
        own, answers = await self._together(
            partial(core.accumulate, mine, loss),
            [training.AccumulateCall(part, loss) for part in others],
            training.Accumulated,
            self._limits.train_step_timeout_s,
        )
        return summed(self._one_of_each([own, *(answer.stats for answer in answers)]))

    async def learn(self, batch: MicroBatch, loss: LossSpec, *, backward: bool = True) -> Learned:
        core, cuts = self._open, self._cuts(batch)
        core.check_learn()
        check_batch(batch, response_positions(batch))
        mine, *others = self._parts(batch, cuts)
        self._segments.make_room()
        own, answers = await self._together(
            partial(core.learn, mine, loss, backward),
            [training.LearnCall(part, loss, backward) for part in others],
            training.TargetsLearned,
            self._limits.train_step_timeout_s,
        )
        return learned_of(batch, cuts, self._one_of_each([own, *(answer.learned for answer in answers)]))

    async def use_recompute(self, way: str) -> None:
        limit_s = self._limits.train_step_timeout_s
        await self._together(partial(self._open.use_recompute, way), UseRecompute(way), training.Finished, limit_s)

    async def measure(self, batch: MicroBatch, loss: LossSpec) -> MemoryUse:
        """The most that a rank takes of memory and time, and the least that one has free."""
        core, (mine, *others) = self._open, self._parts(batch, self._cuts(batch))
        own, answers = await self._together(
            partial(core.measure, mine, loss),
            [Measure(part, loss) for part in others],
            Measured,
            self._limits.train_step_timeout_s,
        )
        uses = [own, *answers]
        peak_bytes, seconds = max(use.peak_bytes for use in uses), max(use.seconds for use in uses)
        return MemoryUse(peak_bytes, min(use.free_bytes for use in uses), seconds)

    async def drop_sums(self) -> None:
        """See ``TrainBackend``.

        Raises:
            RankLost: a call has failed before, so all ranks begin anew.
        """
        if self._failed:
            raise RankLost(f"all ranks begin anew from the newest checkpoint, since one has failed: {self._failed}")
        await self._together(
            self._open.drop_sums, training.DropSums(), training.Finished, self._limits.train_step_timeout_s
        )

    def _cuts(self, batch: MicroBatch) -> list[slice]:
        """The sequences that each rank computes, or each group of ranks that share rows."""
        return shares(batch, self._size // self._context)

    def _parts(self, batch: MicroBatch, cuts: list[slice]) -> list[MicroBatch]:
        """A part for each rank; a rank for which there is no row gets one from which nothing is learned."""
        parts = [rows_of(batch, cut) for cut in cuts] + [nothing()] * (self._size // self._context - len(cuts))
        return [part for part in parts for _ in range(self._context)]

    def _one_of_each(self, of_ranks: list[R]) -> list[R]:
        """Results of the first of each group of ranks that share rows: the others know the same."""
        return of_ranks[:: self._context]

    async def step(self, *, weight: float, adam: AdamStep | None = None) -> StepResult:
        self._open.check_adam(adam)
        own, answers = await self._together(
            partial(self._open.step, weight, adam),
            training.StepCall(weight, adam),
            training.Stepped,
            self._limits.train_step_timeout_s,
        )
        results = [own, *(answer.result for answer in answers)]
        alike = [dataclasses.replace(result, stats=NO_STATS) for result in results]
        for rank, result in enumerate(alike):
            if repr(result) != repr(alike[0]):  # by their text, since a norm of NaN is not equal to itself
                raise RankLost(f"rank {rank} has stepped otherwise than rank 0: {result}, not {alike[0]}")
        return dataclasses.replace(own, stats=summed(self._one_of_each([result.stats for result in results])))

    # ------------------------------------------------------------ files

    async def export_segment(self, path: Path, *, job: str, policy_version: int, chunk_bytes: int) -> Manifest:
        core = self._open
        rows, apart = core.policy.rows, bool(core.world.elsewhere)
        hashes = () if apart else await self._write_segment(path, chunk_bytes)
        manifest = described(
            hashes,
            job=job,
            policy_version=policy_version,
            total_bytes=rows.total_bytes,
            chunk_bytes=chunk_bytes,
            tensors=rows.entries,
            adapter_of="" if core.adapter is None else core.adapter.base,
        )
        return await self._write_shares(path, manifest) if apart else manifest

    async def _write_segment(self, path: Path, chunk_bytes: int) -> tuple[bytes, ...]:
        """Lay the weights out in one file; returns the hashes of its chunks."""
        rows = self._open.policy.rows
        memory, _ = await self._run(self._segments.begin, path, rows.total_bytes)
        await self._write_rows(partial_path(path), self._limits.publish_timeout_s)
        hashes = await self._run(files.finish_segment, memory, path, chunk_bytes, rows.entries, self._segments)
        self._segments.published(path, rows.total_bytes)
        return hashes

    async def _write_shares(self, path: Path, manifest: Manifest) -> Manifest:
        """Lay the weights out where their rows are, a file on each machine; returns the whole manifest."""
        core, limit_s, chunk_bytes = self._open, self._limits.publish_timeout_s, manifest.chunk_bytes
        await self._together(partial(core.write_share, path), WriteShare(str(path)), training.Finished, limit_s)
        own, answers = await self._together(
            partial(core.seal_share, path, chunk_bytes), SealShare(str(path), chunk_bytes), Sealed, limit_s
        )
        hashes = [own, *(answer.hashes for answer in answers)]
        return machine_shares.spread(manifest, core.policy.rows, core.world, hashes)

    async def _write_rows(self, path: Path, limit_s: float) -> None:
        await self._together(partial(self._open.write_rows, path), WriteRows(str(path)), training.Finished, limit_s)

    async def save(self, directory: Path) -> None:
        core, limit_s = self._open, self._limits.checkpoint_timeout_s
        await self._run(files.clear, directory)
        await self._together(
            partial(core.save, directory), training.SaveCall(str(directory.absolute())), training.Finished, limit_s
        )
        await self._run(files.write_state, directory, core)

    async def load(self, directory: Path, *, optimizer: bool = True) -> None:
        core, limit_s = self._open, self._limits.checkpoint_timeout_s
        order = await self._run(files.read_state, directory.absolute(), core)
        order = msgspec.structs.replace(order, optimizer=optimizer)
        await self._together(partial(core.restore, order), order, training.Finished, limit_s)

    async def export_checkpoint(self, directory: Path) -> None:
        core = self._open
        directory.mkdir(parents=True, exist_ok=True)
        path = await self._run(files.empty_file, directory.absolute() / ".rows", core.policy.rows.total_bytes)
        try:
            await self._write_rows(path, self._limits.checkpoint_timeout_s)
            await self._run(files.export, core, path, directory, self._model_path)
        finally:
            path.unlink()

    async def close(self, *, keep: bool = True) -> None:
        core, self._core = self._core, None
        if self._thread is None:
            return
        with contextlib.suppress(TimeoutError):  # if it waits for a lost rank: then it ends with the process
            async with asyncio.timeout(self._limits.rank_settle_s):
                if core is not None:
                    await self._run(core.close)
        self._thread.shutdown(wait=False)
        self._segments.end()
        followers, self._followers = self._followers, NOBODY
        try:
            await followers.close()
        finally:
            if self._meeting is not None:
                remove_meeting(self._meeting)
                self._meeting = None

    # ------------------------------------------------------------ all ranks

    @property
    def _open(self) -> FsdpCore:
        if self._core is None:
            raise BackendClosed(f"the backend was called {'before start' if self._thread is None else 'after close'}")
        return self._core

    async def _run(self, work: Callable[..., R], *args: Any) -> R:
        if self._thread is None:
            raise BackendClosed("the backend was called before start")
        self._own = self._thread.submit(work, *args)
        return await asyncio.wrap_future(self._own)

    async def settled(self) -> None:
        """Return when our own part of every call is over, of one that was given up too.

        Raises:
            RankLost: it is not within ``limits.rank_settle_s``: perhaps it waits for other ranks.
        """
        if self._own is None or self._own.done():
            return
        limit_s = self._limits.rank_settle_s
        waiting = asyncio.timeout(limit_s)
        try:
            async with waiting:
                await asyncio.shield(asyncio.wrap_future(self._own))
        except Exception as error:
            if waiting.expired():
                raise RankLost(f"rank 0 is not done {limit_s:g} s after its call has failed") from error

    async def _together(
        self, work: Callable[[], R], orders: FsdpOrder | Sequence[FsdpOrder], kind: type[A], limit_s: float
    ) -> tuple[R, list[A]]:
        """Do our own part while the followers obey theirs, one order each or one for all; returns the results of both.

        Raises:
            RankLost: a follower is gone, or raised an error unknown here. Other errors are as a rank raised them.
        """
        encoded = self._encoded(orders)
        own = asyncio.ensure_future(self._run(work))
        asked = asyncio.ensure_future(self._ask(encoded, kind, limit_s))
        try:
            mine, theirs = await asyncio.gather(own, asked)
        except Exception:  # noqa: BLE001  ``_cause`` finds out whose error it is
            error = await self._cause(own, asked)
            self._failed = str(error) or type(error).__name__
            raise error from None
        return mine, theirs

    async def _ask(self, orders: Sequence[bytes], kind: type[A], limit_s: float) -> list[A]:
        answers = [decode_answer(a) for a in await self._followers.call(orders, timeout_s=limit_s, ends=is_failure)]
        for rank, answer in enumerate(answers, 1):
            if isinstance(answer, training.CallFailed):
                raise error_of(answer, RankLost)
            if not isinstance(answer, kind):
                raise RankLost(f"rank {rank} answered with {type(answer).__name__}, expected {kind.__name__}")
        return answers  # type: ignore[return-value]  just checked

    def _encoded(self, orders: FsdpOrder | Sequence[FsdpOrder]) -> list[bytes]:
        """Each follower's order as bytes, before any rank begins.

        Raises:
            MicroBatchTooLarge: the largest order, which holds a part of a micro-batch, does not fit into a message.
        """
        others = self._size - 1
        encoded = [encode(o) for o in orders] if isinstance(orders, Sequence) else [encode(orders)] * others
        size = max(map(len, encoded), default=0)
        most = self._limits.message_max_bytes - _AROUND_AN_ORDER_BYTES
        if size > most:
            raise MicroBatchTooLarge(
                f"trainer.micro_batch_tokens: one rank's part of a micro-batch takes {size} bytes, and {most} fit into "
                "a message. Lower trainer.micro_batch_tokens, or raise limits.message_max_bytes"
            )
        return encoded

    async def _cause(self, own: asyncio.Future[Any], asked: asyncio.Future[Any]) -> BaseException:
        """The error to raise: that of the rank that failed by itself, if it becomes known in time, else RankLost."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._limits.rank_settle_s):
                await asyncio.gather(own, asked, return_exceptions=True)
        mine, theirs = (None if future.cancelled() else future.exception() for future in (own, asked))
        said = [error for error in (mine, theirs) if error is not None]
        if not self._followers.count or not said:
            return mine or RankLost("the other ranks wait for one that does nothing")
        for error in said:
            if not _may_be_of_another(error):
                return error
        words = "; ".join(dict.fromkeys(map(str, said)))  # a rank may have failed by itself in the same way
        lost = RankLost(f"a rank is gone, as another one has heard in an exchange, or it has failed: {words}")
        lost.__cause__ = said[0]
        return lost


def _may_be_of_another(error: BaseException) -> bool:
    """Whether the end of another rank may have caused ``error``: gloo raises a plain RuntimeError then."""
    return type(error) is RuntimeError or isinstance(error, dist.DistError)
