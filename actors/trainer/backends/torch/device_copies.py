"""Copies between a CUDA device and pinned memory, on a stream of their own, hashed chunk by chunk beside the copying.

out     device ─ copy ─▶ pinned ─ hash (when the chunk's copy is over)
back    pinned ─ copy ─▶ device
           └──── hash (at the same time)
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import xxhash
from torch import Tensor

from actors.trainer.backends.torch.pinned import PinnedMemory
from actors.weights.memory import on_all_cores


class DeviceCopies:
    """Moves bytes of tensors of one device; calls come from one thread."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)
        self._pins = PinnedMemory()

    def out(self, whole: memoryview, pairs: Sequence[tuple[Tensor, memoryview]], chunk_bytes: int) -> tuple[bytes, ...]:
        """Copy each tensor to its place, which is a part of ``whole``; the digests of the places' chunks, in order."""
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
        """Copy each place to its tensor; the digests of the places' chunks, in order. All of it has arrived."""
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
        """``memory`` will not be used again."""
        self._pins.unpin(memory)

    def close(self) -> None:
        self._pins.close()
