"""Too little memory is known by the errors that libraries raise, and measured in real passes."""

from __future__ import annotations

import weakref
from pathlib import Path

import numpy as np
import pytest
import torch

from actors.host import memory_account
from actors.trainer.backend import BackendSpec, LossSpec
from actors.trainer.backends.out_of_memory import is_out_of_memory, or_out_of_memory
from actors.trainer.backends.torch.torch_backend import TorchBackend
from actors.trainer.errors import OutOfMemory
from actors.trainer.measured_size import fitting_tokens, made_up
from tests.tiny_checkpoint import make_tiny_checkpoint

ROOM_BYTES = 192 << 20


def by_torch() -> object:
    return torch.empty(1 << 58)


def by_numpy() -> object:
    return np.empty(1 << 58)


@pytest.mark.parametrize("allocate", [by_torch, by_numpy])
def test_what_torch_and_numpy_raise_is_out_of_memory(allocate: object) -> None:
    with pytest.raises((RuntimeError, MemoryError)) as raised:
        allocate()  # type: ignore[operator]
    assert is_out_of_memory(raised.value)


@pytest.mark.parametrize(
    ("error", "is_it"),
    [
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB"), True),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"), True),
        (RuntimeError("mat1 and mat2 shapes cannot be multiplied"), False),
        (ValueError("out of memory"), False),
    ],
)
def test_other_errors_are_told_apart(error: Exception, is_it: bool) -> None:
    assert is_out_of_memory(error) is is_it


def test_the_tensors_of_a_pass_that_failed_are_free_when_the_error_is_told() -> None:
    held: list[weakref.ref[torch.Tensor]] = []

    class Model:
        @or_out_of_memory
        def compute(self) -> None:
            activations = torch.ones(1000)
            held.append(weakref.ref(activations))
            by_torch()

    with pytest.raises(OutOfMemory, match="allocate") as raised:
        Model().compute()
    assert raised.value.__context__ is None and held[0]() is None


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
async def test_what_two_passes_say_that_fits_does_fit(tmp_path: Path, device: str) -> None:
    path = make_tiny_checkpoint(tmp_path, hidden=128, layers=4)
    backend = TorchBackend()
    await backend.start(BackendSpec(model_path=path, device=device))
    try:
        uses = [(rows * 128, await backend.measure(made_up(rows, 128), LossSpec())) for rows in (4, 16)]
        tokens = fitting_tokens([(count, use.peak_bytes) for count, use in uses], ROOM_BYTES)
        chosen = await backend.measure(made_up(tokens // 128, 128), LossSpec())
    finally:
        await backend.close()
    assert ROOM_BYTES / 4 < chosen.peak_bytes < 1.1 * ROOM_BYTES < chosen.free_bytes


@pytest.mark.gpu
async def test_on_a_device_that_is_really_full_the_step_is_what_it_would_have_been(tmp_path: Path) -> None:
    """Of the device the process may have a gigabyte, and activations of two million tokens are eighty."""
    path = make_tiny_checkpoint(tmp_path, hidden=128, layers=4)
    one, two = TorchBackend(), TorchBackend()
    for backend in (one, two):
        await backend.start(BackendSpec(model_path=path, device="cuda", learning_rate=0.01))
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction((1 << 30) / total)
    try:
        await one.accumulate(made_up(4, 128), LossSpec())
        with pytest.raises(OutOfMemory):
            await one.accumulate(made_up(4096, 512), LossSpec())
        await one.drop_sums()
        results = []
        for backend in (one, two):
            await backend.accumulate(made_up(4, 128), LossSpec())
            results.append(await backend.step(weight=1.0))
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
        for backend in (one, two):
            await backend.close()
    assert results[0].grad_norm == pytest.approx(results[1].grad_norm, rel=1e-5)


def test_a_control_group_limits_what_is_available(tmp_path: Path) -> None:
    """Both versions; a group that has no limit leaves it to the ones above."""
    new, old = tmp_path / "slice" / "job", tmp_path / "memory" / "box"
    of_old = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
    of_new = ("memory.max", "memory.current", "inactive_file")
    for group, (limit, used, entry) in ((new, of_new), (new.parent, of_new), (old, of_old)):
        group.mkdir(parents=True, exist_ok=True)
        (group / limit).write_text("max\n" if group == new else "1000\n")
        (group / used).write_text("700\n")
        (group / "memory.stat").write_text(f"anon 1\n{entry} 50\n")
    groups = tmp_path / "groups"
    groups.write_text("0::/slice/job\n4:memory:/box\n3:cpu:/box\n")
    assert memory_account._left_in_groups(groups, tmp_path) == [350, 350]
    assert memory_account._left_in_groups(tmp_path / "none", tmp_path) == []


def test_the_peak_of_a_process_counts_from_when_it_was_set_back() -> None:
    np.ones(40_000_000)
    if not memory_account.set_peak_back():
        pytest.skip("this system sets no peak back")
    before = memory_account.peak_bytes()
    np.ones(10_000_000)
    assert 70 << 20 < memory_account.peak_bytes() - before < 200 << 20
