"""Pinned memory of the host, which a device reads and writes at full speed while other work runs.

Memory is pinned where it lies, be it a file in shared memory, and stays so until it is unpinned. Pinning takes longer
than a copy, so memory that is used again and again is pinned once. Where pinning fails (a locked-memory limit), copies
go through unpinned memory, and take several times as long.
"""

from __future__ import annotations

import contextlib
import mmap
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import xxhash
from torch import Tensor

from actors.weights.memory import on_all_cores


class PinnedMemory:
    """Pins memory, and remembers which is pinned; calls come from one thread."""

    def __init__(self) -> None:
        self._pinned: dict[int, int] = {}
        """Sizes in bytes, by address."""

    def pin(self, memory: memoryview) -> bool:
        """Pin ``memory`` if it is not pinned yet; returns whether it is pinned now."""
        address = np.frombuffer(memory, np.uint8).ctypes.data
        size = self._pinned.get(address)
        if size == len(memory):
            return True
        if size is not None:  # other memory was here, and was not unpinned before it was freed
            self._unpin(address)
        if int(_runtime().cudaHostRegister(address, len(memory), 0)) != 0:
            _forget_error()
            return False
        self._pinned[address] = len(memory)
        return True

    def unpin(self, memory: memoryview) -> None:
        """Unpin ``memory``, which is about to be freed."""
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
    """Holds pinned memory through which a tensor's bytes leave the device, kept for the next call."""

    def __init__(self) -> None:
        self._pins = PinnedMemory()
        self._memory: memoryview | None = None

    def bytes_of(self, tensor: Tensor) -> memoryview:
        """uint8[nbytes]: a copy of the bytes of ``tensor``, valid until the next call."""
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


class DeviceCopies:
    """Copies between a CUDA device and pinned memory, on a stream of its own, and hashes chunk by chunk meanwhile.

        out     device ─ copy ─▶ pinned ─ hash (when the chunk's copy is over)
        back    pinned ─ copy ─▶ device
                   └──── hash (at the same time)

    Calls come from one thread.
    """

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)
        self._pins = PinnedMemory()

    def out(self, whole: memoryview, pairs: Sequence[tuple[Tensor, memoryview]], chunk_bytes: int) -> tuple[bytes, ...]:
        """Copy each tensor to its place, a part of ``whole``; returns the digests of the places' chunks, in order."""
        self._pins.pin(whole)
        self._stream.wait_stream(torch.cuda.current_stream())
        chunks: list[tuple[memoryview, torch.cuda.Event]] = []
        with torch.cuda.stream(self._stream):
            for tensor, place in pairs:
                source = tensor.detach().view(torch.uint8)
                for start in range(0, len(place), chunk_bytes):
                    part = place[start : start + chunk_bytes]
                    torch.frombuffer(part, dtype=torch.uint8).copy_(
                        source[start : start + chunk_bytes], non_blocking=True
                    )
                    arrived = torch.cuda.Event()
                    arrived.record()
                    chunks.append((part, arrived))
        return self._digests([part for part, _ in chunks], [event for _, event in chunks])

    def back(
        self, whole: memoryview, pairs: Sequence[tuple[memoryview, Tensor]], chunk_bytes: int
    ) -> tuple[bytes, ...]:
        """Copy each place to its tensor, to the end; returns the digests of the places' chunks, in order."""
        self._pins.pin(whole)
        self._stream.wait_stream(torch.cuda.current_stream())
        chunks: list[memoryview] = []
        with torch.cuda.stream(self._stream):
            for place, tensor in pairs:
                target = tensor.detach().view(torch.uint8)
                for start in range(0, len(place), chunk_bytes):
                    part = place[start : start + chunk_bytes]
                    target[start : start + chunk_bytes].copy_(
                        torch.frombuffer(part, dtype=torch.uint8), non_blocking=True
                    )
                    chunks.append(part)
        digests = self._digests(chunks, [])
        self._stream.synchronize()
        return digests

    @staticmethod
    def _digests(chunks: list[memoryview], arrivals: list[torch.cuda.Event]) -> tuple[bytes, ...]:
        digests: list[bytes] = [b""] * len(chunks)

        def digest(index: int) -> None:
            if arrivals:
                arrivals[index].synchronize()
            digests[index] = xxhash.xxh3_128_digest(chunks[index])

        on_all_cores(digest, list(range(len(chunks))), sum(map(len, chunks)))
        return tuple(digests)

    def forget(self, memory: memoryview) -> None:
        """Unpin ``memory``, which will not be used again."""
        self._pins.unpin(memory)

    def close(self) -> None:
        self._pins.close()


def _forget_error() -> None:
    """Start a kernel to clear the runtime's error, which it would report again at the next kernel start."""
    with contextlib.suppress(RuntimeError):
        torch.zeros(1, device="cuda").add_(1)


def _runtime() -> Any:
    return torch.cuda.cudart()
