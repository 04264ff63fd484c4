"""What the card itself can do, measured beside what uses it: the limits of `bench gpu`."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from time import perf_counter
from typing import Final

import torch

_ROUNDS: Final = 5


def timed(work: Callable[[], object], device: str) -> float:
    """Seconds of ``work``, all that it has put on the card included."""
    _settle(device)
    began = perf_counter()
    work()
    _settle(device)
    return perf_counter() - began


def _settle(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def _median_s(work: Callable[[], object], device: str) -> float:
    work()
    return statistics.median(timed(work, device) for _ in range(_ROUNDS))


def copy_rate(device: str) -> float:
    """Bytes a second of the device's own memory, read and written ones counted."""
    source = torch.ones(1 << (30 if device == "cuda" else 24), dtype=torch.uint8, device=device)
    place = torch.empty_like(source)
    return 2 * source.nbytes / _median_s(lambda: place.copy_(source), device)


def matmul_rate(device: str) -> float:
    """Operations a second of a large bfloat16 product of random numbers."""
    size = 8192 if device == "cuda" else 256
    left, right = (torch.randn(size, size, dtype=torch.bfloat16, device=device) for _ in range(2))
    return 2 * size**3 / _median_s(lambda: left @ right, device)


def host_copies(size: int, device: str) -> tuple[float, float]:
    """Seconds for ``size`` bytes from the device to pinned memory of the host, and back."""
    held = torch.ones(size, dtype=torch.uint8, device=device)
    host = torch.empty(size, dtype=torch.uint8, pin_memory=device == "cuda")
    return _median_s(lambda: host.copy_(held), device), _median_s(lambda: held.copy_(host), device)
