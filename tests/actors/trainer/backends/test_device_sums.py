"""The host waits for the device at a step's end, and not after each micro-batch."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from actors.trainer.backend import NO_STATS, BackendSpec, CriticSpec, LossSpec
from actors.trainer.backends.fsdp.fsdp_backend import FsdpBackend
from actors.trainer.backends.torch.device_sums import DeviceSums
from actors.trainer.backends.torch.torch_backend import TorchBackend
from benchmarks.gpu._long_row import group
from tests.tiny_checkpoint import make_tiny_checkpoint


class Reads(TorchDispatchMode):
    """Counts what makes the host wait for a number of the device: ``item``, ``float``, ``bool`` and their like."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func is torch.ops.aten._local_scalar_dense.default
        return func(*args, **(kwargs or {}))


def counted(monkeypatch: pytest.MonkeyPatch, name: str, calls: list[str]) -> None:
    """Note calls of a method of tensors that copies to the host, which on a CPU is no operation of its own."""
    own = getattr(torch.Tensor, name)

    def noting(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        calls.append(name)
        return own(self, *args, **kwargs)

    monkeypatch.setattr(torch.Tensor, name, noting)


@pytest.mark.parametrize(
    ("recompute", "loss", "with_critic", "rows"),
    [
        ("none", {}, False, (20, 16, 4)),  # a tree in a short row
        ("none", {}, False, (4, 60, 2)),  # sequences by themselves
        ("none", {"entropy_coefficient": 0.1, "kl_coefficient": 0.1}, True, (20, 16, 4)),
        ("whole", {"correction": "icepop"}, False, (20, 16, 4)),
        ("selective", {"surrogate": "weighted"}, False, (600, 200, 16)),  # a long row in blocks
    ],
)
async def test_no_number_is_read_from_the_device_within_a_micro_batch(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    recompute: str,
    loss: dict[str, Any],
    with_critic: bool,
    rows: tuple[int, int, int],
) -> None:
    path = make_tiny_checkpoint(tmp_path)
    batch, _ = group(*rows)
    zeros = np.zeros(batch.input_ids.shape, np.float32)
    batch = dataclasses.replace(batch, reference_logprobs=zeros, old_values=zeros, returns=zeros + 1)
    backend = TorchBackend()
    critic = CriticSpec(model_path=path) if with_critic else None
    await backend.start(BackendSpec(model_path=path, recompute=recompute, critic=critic))
    core, calls = backend._core, list[str]()
    assert core is not None
    core.accumulate(batch, LossSpec(**loss))
    for name in ("tolist", "numpy", "cpu"):
        counted(monkeypatch, name, calls)
    with Reads() as reads:
        core.accumulate(batch, LossSpec(**loss))
    assert (reads.count, calls) == (0, [])
    with Reads() as reads:
        result = core.step(weight=1.0)
    assert reads.count + len(calls) >= 2, "the norm and the sums are read at the step"
    assert result.stats.mismatch_sum > 0
    await backend.close()


async def test_a_rank_reads_no_number_from_the_device_within_a_micro_batch_either(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend, (batch, _) = FsdpBackend(), group(20, 16, 4)
    await backend.start(BackendSpec(model_path=make_tiny_checkpoint(tmp_path), recompute="selective"))
    core, calls = backend._core, list[str]()
    assert core is not None

    def reads_of_a_pass() -> int:
        core.accumulate(batch, LossSpec())
        for name in ("tolist", "numpy", "cpu"):
            counted(monkeypatch, name, calls)
        with Reads() as reads:
            core.accumulate(batch, LossSpec())
        return reads.count

    try:
        assert (await backend._run(reads_of_a_pass), calls) == (0, [])
        assert (await backend.step(weight=1.0)).stats.mismatch_sum > 0
    finally:
        await backend.close()


def test_sums_add_up_in_float64_and_are_told_once() -> None:
    sums = DeviceSums()
    for value in (1e8, 1.0):
        sums.add(loss_sum=torch.tensor(value), kl_sum=torch.tensor(0.5, requires_grad=True))
    assert sums.taken() == dataclasses.replace(NO_STATS, loss_sum=1e8 + 1, kl_sum=1.0)
    assert sums.taken() == NO_STATS


@pytest.mark.gpu
async def test_on_a_device_a_micro_batch_of_padded_rows_makes_the_host_wait_for_nothing(tmp_path: Path) -> None:
    """Torch itself raises where the host would wait."""
    path = make_tiny_checkpoint(tmp_path)
    batch, _ = group(4, 60, 2)
    backend = TorchBackend()
    await backend.start(BackendSpec(model_path=path, device="cuda"))
    core = backend._core
    assert core is not None
    core.accumulate(batch, LossSpec())
    torch.cuda.set_sync_debug_mode("error")
    try:
        core.accumulate(batch, LossSpec())
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert core.step(weight=1.0).stats.mismatch_sum > 0
    await backend.close()
