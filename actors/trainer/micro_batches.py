"""How large micro-batches are: as configured or measured, and half as large whenever the device has no memory for one.

    start      the run's record ─ none ─▶ ``auto``: two measured passes ─▶ recorded         (``measured_size.py``)
    a pass     score, values, accumulate ─ OutOfMemory ─▶ shrink: half is recorded, people are told, sums are dropped
    then       whoever computes repeats the step's work from its beginning (``updates.py``)

Invariants
- A size holds from an update of a step on, and that update is computed with it from its beginning: gradient sums are
  those of a run that had this size from there on, and a later life that trains the step again gets the same bits.
- The record is on the disk before anything is computed with a new size. A size never grows within a run.
- All ranks and replicas get their parts of one micro-batch, so they all change at once.
- A record is of one configured value: with another one in the job file the next life begins a new record.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import msgspec
import numpy as np

from actors.core.context import Context
from actors.host.whole_file import write_whole
from actors.trainer import scarce_memory
from actors.trainer.backend import LossSpec, MicroBatch, MicroBatchStats, TrainBackend
from actors.trainer.errors import CheckpointCorrupt, OutOfMemory, SampleTooLarge
from actors.trainer.measured_size import measured_size
from configs.run_files import MICRO_BATCHES
from configs.schema import RECOMPUTE_WAYS, JobConfig


class Size(msgspec.Struct, frozen=True):
    """Says how many padded tokens a rank's micro-batch may have, from update ``update`` of ``step`` on."""

    step: int
    update: int
    tokens: int

    @property
    def place(self) -> tuple[int, int]:
        return self.step, self.update


class SizeRecord(msgspec.Struct, frozen=True):
    """Holds all sizes of a run. ``configured``: ``trainer.micro_batch_tokens``, to which they belong."""

    configured: int | str
    sizes: tuple[Size, ...]
    recompute: str | None = None
    """``trainer.recompute``, to which they belong as well; None in a record of before there was a choice."""
    way: str = ""
    """The way of ``recompute: auto`` that was chosen; empty: none is."""

    def at(self, step: int, update: int) -> int:
        """Tokens of a rank's micro-batch in that update."""
        began = [size.tokens for size in self.sizes if size.place <= (step, update)]
        return began[-1] if began else self.sizes[0].tokens

    def halved(self, new: Size) -> SizeRecord:
        """The record in which ``new`` holds from its update on; what is smaller later stays."""
        before = [size for size in self.sizes if size.place < new.place]
        after = [size for size in self.sizes if size.place > new.place and size.tokens < new.tokens]
        return msgspec.structs.replace(self, sizes=(*before, new, *after))


class MicroBatches:
    """Passes micro-batches of one job to its backend, and decides how large they are.

    ``tell``: callback that tells people of a trouble, by its kind and a text.
    """

    def __init__(
        self, ctx: Context, job: JobConfig, run_dir: Path, backend: TrainBackend, tell: Callable[[str, str], None]
    ) -> None:
        self._ctx, self._job, self._backend, self._tell = ctx, job, backend, tell
        self._path = run_dir / MICRO_BATCHES
        self._ranks = job.trainer.ranks
        trainer = job.trainer
        first = Size(0, 0, trainer.pass_tokens // self._ranks)
        self._record = SizeRecord(trainer.micro_batch_tokens, (first,), trainer.recompute)
        self._place = (0, 0)
        self._tried: MicroBatch | None = None

    async def open(self, loss: LossSpec) -> None:
        """Read the run's record, or choose a size, for a backend that has started.

        Raises:
            CheckpointCorrupt: the record cannot be read.
        """
        kept, new = await self._ctx.run_blocking(_read, self._path), self._record
        if kept is not None and kept.configured == new.configured and kept.recompute in (None, new.recompute):
            self._record = msgspec.structs.replace(kept, recompute=new.recompute)
        elif new.configured == "auto" and (found := await measured_size(self._backend, self._job, loss)) is not None:
            way = found.way if new.recompute == "auto" else ""
            await self._keep(msgspec.structs.replace(new, sizes=(Size(0, 0, found.tokens),), way=way))
            await self._backend.drop_sums()  # a pass that found no memory has left some, or ended this life
            self._ctx.log.info("micro-batches are sized by measured memory", tokens=found.tokens, recompute=found.way)
        if self._record.way:
            await self._backend.use_recompute(self._record.way)

    def begin(self, step: int, update: int = 0) -> None:
        """Take the size of that update from now on."""
        self._place = (step, update)

    @property
    def tokens(self) -> int:
        """Padded tokens of a rank's part of a micro-batch."""
        return self._record.at(*self._place)

    @property
    def metrics(self) -> dict[str, float]:
        """Columns of a step's row. ``recompute``: the number of the way that ``auto`` has chosen."""
        way = self._record.way
        chosen = {"recompute": float(RECOMPUTE_WAYS.index(way))} if way else {}
        return {"micro_batch_tokens": float(self.tokens), **chosen}

    @property
    def pass_tokens(self) -> int:
        """Padded tokens of a micro-batch, of all ranks together."""
        return self.tokens * self._ranks

    async def accumulate(self, batch: MicroBatch, loss: LossSpec) -> MicroBatchStats:
        self._tried = batch
        stats = await self._backend.accumulate(batch, loss)
        scarce_memory.check(batch, ranks=self._ranks)
        return stats

    async def score(self, batch: MicroBatch, *, temperature: float, reference: bool) -> np.ndarray:
        self._tried = batch
        return await self._backend.score(batch, temperature=temperature, reference=reference)

    async def values(self, batch: MicroBatch) -> np.ndarray:
        self._tried = batch
        return await self._backend.values(batch)

    async def shrink(self, error: OutOfMemory) -> None:
        """Halve micro-batches, after the last one has raised ``error``, and drop the gradient sums.

        Raises:
            SampleTooLarge: that one cannot be cut any further.
            RankLost: this life of the backend cannot go on; the next one takes the smaller size.
        """
        batch, (step, update) = self._tried, self._place
        assert batch is not None, "a pass has failed"
        rows, width = batch.input_ids.shape
        if rows <= self._ranks:
            raise SampleTooLarge(_too_large(batch, self._job, error))
        before = self.tokens
        tokens = max(1, max(width, min(self.pass_tokens, rows * width) // 2) // self._ranks)
        await self._keep(self._record.halved(Size(step, update, tokens)))
        self._tell(
            "out_of_memory",
            f"step {step}: the trainer ran out of memory, and repeats the step with {tokens} tokens in a micro-batch "
            f"instead of {before}, as it does from now on (trainer.micro_batch_tokens): {error}",
        )
        await self._backend.drop_sums()

    async def _keep(self, record: SizeRecord) -> None:
        await self._ctx.run_blocking(_write, self._path, record)
        self._record = record


def _write(path: Path, record: SizeRecord) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, msgspec.json.format(msgspec.json.encode(record)) + b"\n", lasting=True)


def _read(path: Path) -> SizeRecord | None:
    """The record of earlier lives; None if they have left none."""
    try:
        found = msgspec.json.decode(path.read_bytes(), type=SizeRecord)
    except FileNotFoundError:
        return None
    except (OSError, msgspec.DecodeError) as error:
        raise CheckpointCorrupt(f"{path}: {error}; remove it to have a size chosen anew") from error
    if not found.sizes or min(size.tokens for size in found.sizes) < 1:
        raise CheckpointCorrupt(f"{path}: sizes must be there, and above 0; remove it to have one chosen anew")
    return found


def _too_large(batch: MicroBatch, job: JobConfig, error: OutOfMemory) -> str:
    ways = ["lower rollout.max_tokens or data.max_prompt_tokens"]
    if job.has_episodes:
        ways = ["lower environment.episode_tokens"]
    if job.trainer.recompute != "whole":
        ways.append("set trainer.recompute: whole")
    ways.append("share the model out (trainer.backend: fsdp with more ranks), or take a device with more memory")
    longest = int(batch.lengths.max())
    return f"a sample of {longest} tokens, alone in its micro-batch, finds no memory ({error}): {'; '.join(ways)}"
