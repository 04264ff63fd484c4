"""The micro-batch that fits into a device's memory, from two measured ones: memory = fixed + tokens × a token's.

    two passes of made-up rows ─▶ (tokens, peak) each ─▶ a line through both ─▶ tokens at SHARE of what is free
                                                                              ─▶ down to a power of two

Rows have as many tokens as the job's longest sample, up to ``ROW_TOKENS``: layouts and blocks keep memory linear in the
tokens of a micro-batch. Everything but a row's first token counts as a response, which is the most that logits can
take. On a CPU the free memory is the machine's, so it is shared with the job's other processes there.

With ``trainer.recompute: auto`` each way is measured so, and one of them is chosen.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from actors.trainer.backend import LossSpec, MemoryUse, MicroBatch, TrainBackend
from actors.trainer.errors import OutOfMemory
from actors.trainer.setup import resolve_device
from configs.schema import JobConfig

PROBES_TOKENS: Final = (512, 2048)
"""Tokens of the two passes: enough to tell them apart, few enough for seconds on a CPU."""
ROW_TOKENS: Final = 1024
WAYS: Final = ("whole", "selective", "none")
"""Values of ``trainer.recompute`` that ``auto`` measures, those first that take less memory. Not ``offload``: what it
takes of the host's memory is not measured."""
SHARE: Final = 0.8
"""Share of the free memory that a micro-batch may take; the rest is for fragments, and for rows unlike the probes'."""
LEAST_TOKENS: Final = 256
MOST_TOKENS: Final = 65_536
"""Bounds of what is chosen. Beyond the upper one nothing gets faster, and messages to ranks get large."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MeasuredSize:
    """Says what one way of ``trainer.recompute`` has room for, and how fast it is. ``tokens``: of a micro-batch."""

    way: str
    tokens: int
    token_s: float = math.inf
    """Time of a token in the larger pass; infinite if that found no memory."""


async def measured_size(backend: TrainBackend, job: JobConfig, loss: LossSpec) -> MeasuredSize | None:
    """The size of a rank's micro-batch, and the way; None if the backend cannot tell what memory is taken.

    A way that finds no memory is the last one that is tried: those after it take more.
    """
    trainer, found = job.trainer, list[MeasuredSize]()
    for way in WAYS if trainer.recompute == "auto" else (trainer.recompute,):
        if trainer.recompute == "auto":
            await backend.use_recompute(way)
        size = await _measured(backend, job, loss, way)
        if size is None:
            return None
        found.append(size)
        if math.isinf(size.token_s):
            break
    longest = -(-job.sequence_tokens // trainer.context_ranks)  # tokens of the longest sample, on one rank
    return chosen(found, least_tokens=max(PROBES_TOKENS[-1], longest))


def chosen(sizes: Sequence[MeasuredSize], *, least_tokens: int) -> MeasuredSize:
    """The fastest of those that have room for ``least_tokens``; if none has, of those with the most room."""
    enough = min(least_tokens, max(size.tokens for size in sizes))
    return min((size for size in sizes if size.tokens >= enough), key=lambda size: size.token_s)


async def _measured(backend: TrainBackend, job: JobConfig, loss: LossSpec, way: str) -> MeasuredSize | None:
    trainer, found = job.trainer, list[tuple[int, MemoryUse]]()
    for tokens in PROBES_TOKENS:
        rows = max(1, tokens // min(job.sequence_tokens, ROW_TOKENS))
        batch = made_up(rows * trainer.ranks, min(job.sequence_tokens, ROW_TOKENS))
        try:
            use = await backend.measure(batch, loss)
        except OutOfMemory:
            return MeasuredSize(way=way, tokens=PROBES_TOKENS[0] if found else LEAST_TOKENS)
        if use is None:
            return None
        found.append((batch.input_ids.size // trainer.ranks, use))
    others = job.ranks_here + job.rollout.workers if _on_cpu(job) else 1
    free_bytes = min(use.free_bytes for _, use in found) / others
    tokens, (size, larger) = fitting_tokens([(n, use.peak_bytes) for n, use in found], SHARE * free_bytes), found[-1]
    return MeasuredSize(way=way, tokens=tokens, token_s=larger.seconds / size)


def _on_cpu(job: JobConfig) -> bool:
    return resolve_device(job.trainer.device, job.trainer.backend) == "cpu"


def fitting_tokens(measured: list[tuple[int, int]], room_bytes: float) -> int:
    """The largest power of two of tokens that takes ``room_bytes`` at most, within bounds.

    ``measured``: tokens and bytes of two passes; where the larger one takes no more, memory does not limit tokens.
    """
    (few, few_bytes), (many, many_bytes) = measured
    token_bytes = (many_bytes - few_bytes) / max(1, many - few)
    if token_bytes <= 0:
        return MOST_TOKENS
    fixed_bytes = max(0.0, few_bytes - token_bytes * few)
    most = max(0.0, (room_bytes - fixed_bytes) / token_bytes)
    return max(LEAST_TOKENS, min(MOST_TOKENS, 1 << max(0, int(most).bit_length() - 1)))


def made_up(rows: int, width: int) -> MicroBatch:
    """Rows of arbitrary tokens, no two with a beginning in common."""
    ids = np.random.default_rng(0).integers(0, 32, (rows, width), dtype=np.int32)
    where = np.broadcast_to(np.arange(width) >= 1, ids.shape).astype(np.float32)
    zeros, lengths = np.zeros(ids.shape, np.float32), np.full(rows, width, np.int32)
    return MicroBatch(
        input_ids=ids,
        lengths=lengths,
        prompt_lengths=np.ones(rows, np.int32),
        behaviour_logprobs=zeros,
        advantages=where,
        loss_weight=where,
        reference_logprobs=zeros,
        old_values=zeros,
        returns=zeros,
    )
