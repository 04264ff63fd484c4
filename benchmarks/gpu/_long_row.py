"""One run of ``bench long_rows``: a micro-batch through the torch backend, in this process alone."""

from __future__ import annotations

import asyncio
import json
import os
import resource
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch

from actors.trainer.backend import BackendSpec, LossSpec, MicroBatch
from actors.trainer.backends.fsdp.fsdp_backend import FsdpBackend
from actors.trainer.backends.torch import causal_lm, packing
from actors.trainer.backends.torch.packing import Layout, packed, padded, plan_blocks
from actors.trainer.backends.torch.torch_backend import TorchBackend
from actors.trainer.learning.samples import TrainSample, pad
from tests.rank_processes import RankProcesses
from tests.tiny_checkpoint import make_tiny_checkpoint

SIBLINGS: Final = 8
_VOCABULARY: Final = 96


def group(prompt_tokens: int, response_tokens: int, shared_tokens: int) -> tuple[MicroBatch, int]:
    """A group of eight, and the number of its distinct tokens that are computed: the last of a response is not.

    Siblings 2 k and 2 k + 1 begin with the same ``shared_tokens``; after them, and else at once, all differ.
    """
    rng = np.random.default_rng(0)

    def drawn(count: int) -> np.ndarray:
        return rng.integers(20, _VOCABULARY, count).astype(np.int32)

    prompt, beginning, samples = drawn(prompt_tokens), drawn(0), list[TrainSample]()
    for sibling in range(SIBLINGS):
        if sibling % 2 == 0:
            beginning = np.concatenate([[3 + sibling], drawn(shared_tokens - 1)])
        rest = np.concatenate([[4 + sibling], drawn(response_tokens - shared_tokens - 1)])
        tokens = np.concatenate([beginning, rest]).astype(np.int32)
        samples.append(
            TrainSample(
                prompt=0, sibling=sibling, prompt_ids=prompt, tokens=tokens,
                logprobs=np.full(response_tokens, -4.6, np.float32), stale=np.zeros(response_tokens, np.bool_),
                advantage=float(rng.normal()),
            )
        )  # fmt: skip
    distinct = prompt_tokens + SIBLINGS * (response_tokens - 1) - SIBLINGS // 2 * shared_tokens
    return pad(samples), distinct


def group_of(case: str, tokens: int) -> tuple[MicroBatch, int]:
    """``tokens`` are all of the group's, an eighth the prompt, or those of each sequence, three quarters the prompt."""
    shared = tokens // 128
    if case == "each":
        return group(tokens - tokens // 4, tokens // 4, shared)
    prompt = tokens // 8
    return group(prompt, (tokens - prompt + SIBLINGS // 2 * shared) // SIBLINGS, shared)


def one_row(batch: MicroBatch, predicted: np.ndarray, **_: Any) -> Layout:
    """Everything in one row, whatever it costs."""
    return packed(batch, predicted, [tuple(plan_blocks(batch, row_tokens_max=sys.maxsize))])


def every_sequence(batch: MicroBatch, predicted: np.ndarray, **_: Any) -> Layout:
    """Padded rows, whatever they cost."""
    return padded(batch, predicted)


CHOICES: Final[dict[str, Callable[..., Layout]]] = {"dense": one_row, "padded": every_sequence}
"""By kind; with another the trainer chooses."""


def held_mib(device: str) -> float:
    """Memory that this process holds."""
    if device == "cuda":
        return torch.cuda.memory_allocated() / 2**20
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20


def peak_mib(device: str) -> float:
    """The most that it has held."""
    if device == "cuda":
        return torch.cuda.max_memory_allocated() / 2**20
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10


async def run(case: str, kind: str, tokens: int, device: str, dtype: str, scratch: str) -> dict[str, Any]:
    """Forward and backward of the group; the gradient is left in the scratch directory."""
    shapes: list[int] = []
    choose = CHOICES.get(kind, packing.choose)

    def noted(batch: MicroBatch, predicted: np.ndarray, **how: Any) -> Layout:
        layout = choose(batch, predicted, **how)
        shapes.append(layout.input_ids.size)
        return layout

    causal_lm.choose = noted
    path = Path(scratch) / "model"
    if not path.exists():
        make_tiny_checkpoint(path, hidden=64, layers=2)
    processes = RankProcesses("fsdp", 2) if kind == "two_ranks" else None
    backend: TorchBackend | FsdpBackend = TorchBackend()
    if kind == "one_rank":
        backend = FsdpBackend()
    elif processes is not None:
        backend = FsdpBackend(processes.followers(), context=2)
    spec = BackendSpec(
        model_path=path, attention=kind if kind == "flex" else "dense" if kind in CHOICES else "blocks",
        device=device, dtype=dtype, threads=len(os.sched_getaffinity(0)),
    )  # fmt: skip
    await backend.start(spec)
    await backend.accumulate(group(32, 16, 4)[0], LossSpec())  # the first pass allocates for good
    await backend.step(weight=1.0)
    batch, distinct = group_of(case, tokens)
    before, start_s = held_mib(device), time.perf_counter()
    stats = await backend.accumulate(batch, LossSpec())
    assert backend._core is not None  # noqa: SLF001
    loss = backend._core.policy.taken_stats().loss_sum  # noqa: SLF001  which waits for the device
    seconds = time.perf_counter() - start_s
    found = {
        "seconds": round(seconds, 2), "peak_added_mib": round(peak_mib(device) - before), "tokens": stats.tokens,
        "computed_tokens": shapes[-1], "distinct_tokens": distinct, "loss": loss,
    }  # fmt: skip
    if isinstance(backend, TorchBackend):
        gradient = backend._core.policy.parameters.grad.float().cpu().numpy()  # noqa: SLF001
    else:
        gradient = np.array([(await backend.step(weight=1.0)).grad_norm])
    np.save(Path(scratch) / f"{case}.{kind}.npy", gradient)
    await backend.close()
    if processes is not None:
        processes.close()
    return found


if __name__ == "__main__":
    print(json.dumps(asyncio.run(run(**json.loads(sys.argv[1])))), flush=True)
