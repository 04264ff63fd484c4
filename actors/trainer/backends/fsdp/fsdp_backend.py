"""The sharded backend, as its leader has it: rank 0 of a world, one device a rank, any Hugging Face causal LM.

    accumulate   micro-batch ─ a part for each rank ─▶ followers and our own core, at once ─▶ statistics, added in order
    step         all ranks ─▶ one result, which all of them must have
    export       room for the segment ─▶ every rank writes its rows ─▶ hashed, whole under its name
    save         every rank writes its file ─▶ backend.json

Invariants
- A call is answered when all ranks have done their part. If one fails, so does the call, and the group's life is over.
- Which rank computes what depends on the micro-batch and the number of ranks: the same number gives the same bits.
- Ranks of the first replica are on the leader's machine: they write into its files.
- What torch says when another rank is gone is RankLost, whichever rank hears it, and however late others tell more.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, Final, TypeVar

import msgspec
import numpy as np
import torch.distributed as dist

from actors.protocol.training import (
    Accumulate,
    Accumulated,
    Failed,
    Finished,
    Save,
    Score,
    Scored,
    Step,
    Stepped,
    Valued,
    Values,
)
from actors.protocol.weights import Manifest
from actors.ranks.errors import RankLost
from actors.ranks.followers import Followers
from actors.trainer.backend import BackendSpec, LossSpec, MicroBatch, MicroBatchStats, StepResult, StoredBytes
from actors.trainer.backends.fsdp import files
from actors.trainer.backends.fsdp.core import FsdpCore
from actors.trainer.backends.fsdp.orders import (
    Answer,
    Begin,
    Begun,
    Meeting,
    Order,
    WriteRows,
    decode_answer,
    encode,
    is_failure,
    nothing,
    remove_meeting,
)
from actors.trainer.backends.fsdp.world import LOOPBACK, open_store
from actors.trainer.backends.remote_errors import error_of
from actors.trainer.backends.segment_file import described
from actors.trainer.backends.torch.causal_lm import check_batch, response_positions
from actors.trainer.backends.torch.critic import judgement
from actors.trainer.backends.torch.replicas import rows_of, shares, summed
from actors.trainer.errors import BackendClosed, MicroBatchTooLarge, ModelNotLoadable
from actors.weights.memory import SegmentWriter, partial_path
from actors.weights.segments import host_id
from configs.limits import Limits

R = TypeVar("R")
A = TypeVar("A", bound=Answer)

_AROUND_AN_ORDER_BYTES: Final = 1024
"""What a message has besides the order that it carries, and more."""


class FsdpBackend:
    """Implements ``TrainBackend``; see there for the promises."""

    kind = files.KIND

    def __init__(
        self,
        followers: Followers | None = None,
        limits: Limits | None = None,
        *,
        replicas: int = 1,
        offload: bool = False,
        host: str = LOOPBACK,
    ) -> None:
        """``followers``: the other ranks, None for a world of one. ``host``: by which they reach this machine."""
        self._followers = followers
        self._limits = limits or Limits()
        self._replicas = replicas
        self._offload = offload
        self._host = host
        self._thread: ThreadPoolExecutor | None = None
        self._core: FsdpCore | None = None
        self._model_path = Path()
        self._meeting: Meeting | None = None
        self._segments = SegmentWriter()
        self._helper: ThreadPoolExecutor | None = None
        """Makes room for the next version while this one is trained on."""
        self._next_segment: tuple[Path, int] | None = None

    @property
    def _size(self) -> int:
        return 1 + (0 if self._followers is None else self._followers.count)

    async def start(self, spec: BackendSpec) -> None:
        self._thread = ThreadPoolExecutor(1, "train")
        self._helper = ThreadPoolExecutor(1, "segments")
        self._model_path = spec.model_path
        timeout_s = self._limits.train_step_timeout_s
        unplaced = Meeting("", self._host, 0, self._size, self._replicas, self._offload, timeout_s)
        store, meeting = await self._run(open_store, unplaced)
        self._meeting = meeting
        begin = Begin(msgspec.json.encode(spec, enc_hook=str).decode(), meeting)
        self._core, others = await self._together(
            partial(FsdpCore, spec, meeting, 0, store), begin, Begun, self._limits.ready_timeout_s
        )
        for rank, other in enumerate(others, 1):
            if rank < self._core.world.shards and other.host != host_id():
                raise ModelNotLoadable(
                    f"trainer.replicas: {self._replicas} of {self._size} ranks, so rank {rank} holds a part of the "
                    "leader's copy of the weights, and it is on another machine; have a replica on each machine"
                )

    def stored_bytes(self) -> StoredBytes:
        core, segment = self._open, self._open.policy.rows.total_bytes
        numbers = core.policy.numbers + (0 if core.critic is None else core.critic.numbers)
        return StoredBytes(segment=segment, checkpoint=3 * 4 * numbers + 2 * segment)

    # ------------------------------------------------------------ computing

    async def score(self, batch: MicroBatch, *, temperature: float, reference: bool) -> np.ndarray:
        core = self._open
        return await self._of_each_token(
            batch,
            lambda part: core.score(part, temperature, reference),
            lambda part: Score(part, temperature, reference),
            Scored,
        )

    async def values(self, batch: MicroBatch) -> np.ndarray:
        return await self._of_each_token(batch, self._open.values, Values, Valued)

    async def _of_each_token(
        self,
        batch: MicroBatch,
        work: Callable[[MicroBatch], np.ndarray],
        order: Callable[[MicroBatch], Order],
        kind: type[Scored | Valued],
    ) -> np.ndarray:
        """What all ranks say of the tokens of their parts, float32[B, T]."""
        check_batch(batch, response_positions(batch))
        cuts = shares(batch, self._size)
        mine, *others = self._parts(batch, cuts)
        own, answers = await self._together(
            partial(work, mine), [order(part) for part in others], kind, self._limits.train_step_timeout_s
        )
        found = [own, *(answer.logprobs if isinstance(answer, Scored) else answer.values for answer in answers)]
        result = np.zeros(batch.input_ids.shape, dtype=np.float32)
        for rows, numbers in zip(cuts, found, strict=False):
            result[rows, : numbers.shape[1]] = numbers
        return result

    async def accumulate(self, batch: MicroBatch, loss: LossSpec) -> MicroBatchStats:
        check_batch(batch, batch.loss_weight != 0)
        core, (mine, *others) = self._open, self._parts(batch, shares(batch, self._size))
        if core.critic is not None:
            judgement(batch)
        if self._next_segment is not None and self._helper is not None:  # others have pulled the last one by now
            self._helper.submit(self._segments.prepare, *self._next_segment)
            self._next_segment = None
        own, answers = await self._together(
            partial(core.accumulate, mine, loss),
            [Accumulate(part, loss) for part in others],
            Accumulated,
            self._limits.train_step_timeout_s,
        )
        return summed([own, *(answer.stats for answer in answers)])

    def _parts(self, batch: MicroBatch, cuts: list[slice]) -> list[MicroBatch]:
        """A part for each rank, where there are not enough rows one of which nothing is learned."""
        return [rows_of(batch, cut) for cut in cuts] + [nothing()] * (self._size - len(cuts))

    async def step(self, *, weight: float) -> StepResult:
        own, answers = await self._together(
            partial(self._open.step, weight), Step(weight), Stepped, self._limits.train_step_timeout_s
        )
        for rank, answer in enumerate(answers, 1):
            if repr(answer.result) != repr(own):  # a norm that is no number is equal to none
                raise RankLost(f"rank {rank} has stepped otherwise than rank 0: {answer.result}, not {own}")
        return own

    # ------------------------------------------------------------ files

    async def export_segment(self, path: Path, *, job: str, policy_version: int, chunk_bytes: int) -> Manifest:
        core, unfinished = self._open, partial_path(path)
        rows = core.policy.rows
        memory, _ = await self._run(self._segments.begin, path, rows.total_bytes)
        await self._write_rows(unfinished, self._limits.publish_timeout_s)
        hashes = await self._run(files.finish_segment, memory, path, chunk_bytes, rows.entries, self._segments)
        self._next_segment = path, rows.total_bytes
        return described(
            hashes,
            job=job,
            policy_version=policy_version,
            total_bytes=rows.total_bytes,
            chunk_bytes=chunk_bytes,
            tensors=rows.entries,
            adapter_of="" if core.adapter is None else core.adapter.base,
        )

    async def _write_rows(self, path: Path, limit_s: float) -> None:
        await self._together(partial(self._open.write_rows, path), WriteRows(str(path)), Finished, limit_s)

    async def save(self, directory: Path) -> None:
        core, limit_s = self._open, self._limits.checkpoint_timeout_s
        await self._run(files.clear, directory)
        await self._together(partial(core.save, directory), Save(str(directory.absolute())), Finished, limit_s)
        await self._run(files.write_state, directory, core)

    async def load(self, directory: Path) -> None:
        core, limit_s = self._open, self._limits.checkpoint_timeout_s
        order = await self._run(files.read_state, directory.absolute(), core)
        await self._together(partial(core.restore, order), order, Finished, limit_s)

    async def export_checkpoint(self, directory: Path) -> None:
        core = self._open
        directory.mkdir(parents=True, exist_ok=True)
        path = await self._run(files.empty_file, directory.absolute() / ".rows", core.policy.rows.total_bytes)
        try:
            await self._write_rows(path, self._limits.checkpoint_timeout_s)
            await self._run(files.export, core, path, directory, self._model_path)
        finally:
            path.unlink()

    async def close(self) -> None:
        core, self._core = self._core, None
        if self._thread is None:
            return
        with contextlib.suppress(TimeoutError):  # it waits for a rank that is lost; it goes with the process
            async with asyncio.timeout(self._limits.rank_settle_s):
                if core is not None:
                    await self._run(core.close)
        self._thread.shutdown(wait=False)
        if self._helper is not None:
            self._helper.submit(self._segments.close)
            self._helper.shutdown(wait=False)
            self._helper = None
        if self._followers is not None:
            await self._followers.close()
            self._followers = None
        if self._meeting is not None:
            remove_meeting(self._meeting)

    # ------------------------------------------------------------ all ranks

    @property
    def _open(self) -> FsdpCore:
        if self._core is None:
            raise BackendClosed(f"the backend was called {'before start' if self._thread is None else 'after close'}")
        return self._core

    async def _run(self, work: Callable[..., R], *args: Any) -> R:
        if self._thread is None:
            raise BackendClosed("the backend was called before start")
        return await asyncio.get_running_loop().run_in_executor(self._thread, work, *args)

    async def _together(
        self, work: Callable[[], R], orders: Order | Sequence[Order], kind: type[A], limit_s: float
    ) -> tuple[R, list[A]]:
        """Do our own part while the followers do theirs, one order each or all the same; what each has answered.

        Raises:
            RankLost: a follower is gone, or raised what has no name here. Other errors are a rank's own.
        """
        encoded = self._encoded(orders)
        own = asyncio.ensure_future(self._run(work))
        asked = asyncio.ensure_future(self._ask(encoded, kind, limit_s))
        try:
            mine, theirs = await asyncio.gather(own, asked)
        except Exception:  # noqa: BLE001  whose error it is comes out below
            raise await self._cause(own, asked) from None
        return mine, theirs

    async def _ask(self, orders: Sequence[bytes], kind: type[A], limit_s: float) -> list[A]:
        followers = self._followers
        if followers is None:
            return []
        answers = [decode_answer(a) for a in await followers.call(orders, timeout_s=limit_s, ends=is_failure)]
        for rank, answer in enumerate(answers, 1):
            if isinstance(answer, Failed):
                raise error_of(answer, RankLost)
            if not isinstance(answer, kind):
                raise RankLost(f"rank {rank} answered with {type(answer).__name__}, expected {kind.__name__}")
        return answers  # type: ignore[return-value]  just checked

    def _encoded(self, orders: Order | Sequence[Order]) -> list[bytes]:
        """The order of each follower as bytes, before anybody begins.

        Raises:
            MicroBatchTooLarge: the largest one, which is a part of a micro-batch, does not fit into a message.
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
        """The error to be told: of whoever has failed by itself, if that comes to be known in time, else RankLost."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._limits.rank_settle_s):
                await asyncio.gather(own, asked, return_exceptions=True)
        mine, theirs = (None if future.cancelled() else future.exception() for future in (own, asked))
        said = [error for error in (mine, theirs) if error is not None]
        if self._followers is None or not said:
            return mine or RankLost("the other ranks wait for one that does nothing")
        for error in said:
            if not _may_be_of_another(error):
                return error
        words = "; ".join(dict.fromkeys(map(str, said)))  # a rank may have failed by itself in the same way
        lost = RankLost(f"a rank is gone, as another one has heard in an exchange, or it has failed: {words}")
        lost.__cause__ = said[0]
        return lost


def _may_be_of_another(error: BaseException) -> bool:
    """Whether another rank's end may be behind it: torch has no type of its own for that, and gloo gives it none."""
    return type(error) is RuntimeError or isinstance(error, dist.DistError)
