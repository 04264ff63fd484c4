"""Pinned memory of the host: what a device reads and writes at full speed, beside whatever else runs.

Memory is pinned where it lies, be it a file in shared memory, and stays so until it is unpinned. Pinning takes longer
than a copy, so it is done once for what is used again and again. Where it fails (a locked-memory limit), copies go the
ordinary way, several times as long.
"""

from __future__ import annotations

import contextlib
import mmap
from typing import Any

import numpy as np
import torch
from torch import Tensor


class PinnedMemory:
    """Remembers what is pinned; calls come from one thread."""

    def __init__(self) -> None:
        self._pinned: dict[int, int] = {}
        """Addresses, each with its size in bytes."""

    def pin(self, memory: memoryview) -> bool:
        """Pin ``memory`` if it is not pinned yet; whether it is now."""
        address = np.frombuffer(memory, np.uint8).ctypes.data
        size = self._pinned.get(address)
        if size == len(memory):
            return True
        if size is not None:  # other memory was here: its owner has not told us that it is gone
            self._unpin(address)
        if int(_runtime().cudaHostRegister(address, len(memory), 0)) != 0:
            _forget_error()
            return False
        self._pinned[address] = len(memory)
        return True

    def unpin(self, memory: memoryview) -> None:
        """``memory`` is about to go away."""
        address = np.frombuffer(memory, np.uint8).ctypes.data
        if address in self._pinned:
            self._unpin(address)

    def close(self) -> None:
        for address in list(self._pinned):
            self._unpin(address)

    def _unpin(self, address: int) -> None:
        torch.cuda.synchronize()
        del self._pinned[address]
        _runtime().cudaHostUnregister(address)


class Staging:
    """Holds pinned memory through which a tensor's bytes leave the device, kept from one time to the next."""

    def __init__(self) -> None:
        self._pins = PinnedMemory()
        self._memory: memoryview | None = None

    def bytes_of(self, tensor: Tensor) -> memoryview:
        """uint8[nbytes]: a copy of the bytes of ``tensor``, good until the next call."""
        if self._memory is None or len(self._memory) != tensor.nbytes:
            self.close()
            self._memory = memoryview(mmap.mmap(-1, tensor.nbytes))
            self._pins.pin(self._memory)
        place = torch.frombuffer(self._memory, dtype=torch.uint8)
        place.copy_(tensor.detach().view(torch.uint8), non_blocking=True)
        torch.cuda.current_stream().synchronize()
        return self._memory

    def close(self) -> None:
        self._pins.close()
        self._memory = None


def _forget_error() -> None:
    """The runtime tells of an error once more, to whoever starts the next kernel: let that be us."""
    with contextlib.suppress(RuntimeError):
        torch.zeros(1, device="cuda").add_(1)


def _runtime() -> Any:
    return torch.cuda.cudart()
