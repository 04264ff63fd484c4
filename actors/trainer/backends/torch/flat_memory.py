"""The memory of flat buffers: allocated, given back while a bundle is parked, and allocated again.

    PlainMemory     CPU    pages go back to the system; addresses stay, and read as zeros
                    CUDA   storages are emptied and filled again; addresses may change, views follow them
    MappedMemory    CUDA   addresses are reserved for good; the memory behind them is unmapped and mapped again

``MappedMemory`` is for backends that will be parked (``BackendSpec.parkable``): a captured graph, or any other holder
of a tensor's address, may go on using it. ``PlainMemory`` takes its place where the driver cannot map memory.
"""

from __future__ import annotations

import mmap
import sys
from collections.abc import Iterable
from typing import Protocol

import torch
from torch import Tensor

from actors.host.host_memory import give_back_pages
from actors.trainer.backends.torch.cuda_mapping import CudaMapping, MappingFailed


class FlatMemory(Protocol):
    """Makes flat tensors and takes them back; calls come from one thread."""

    @property
    def keeps_addresses(self) -> bool:
        """Whether tensors have the same addresses after ``back``."""
        ...

    @property
    def keeps_addresses_by_itself(self) -> bool:
        """Whether only tensors that were made here keep their addresses."""
        ...

    def zeros(self, count: int, dtype: torch.dtype) -> Tensor: ...

    def release(self, tensors: Iterable[Tensor]) -> None:
        """Give back the memory of whole tensors, each with a storage of its own; their contents are lost."""
        ...

    def back(self, tensors: Iterable[Tensor]) -> None:
        """Give released tensors memory again, with arbitrary contents; on a CPU as ``release`` left them.

        Raises an error of torch or ``MappingFailed`` if there is too little; ``release`` then frees what was allocated.
        """
        ...

    def taken_bytes(self, size: int) -> int:
        """Bytes of memory that a tensor of ``size`` bytes takes."""
        ...

    def released_bytes(self, sizes: Iterable[int]) -> int:
        """Bytes that tensors of ``sizes`` bytes still take after ``release``, at most."""
        ...

    def close(self) -> None:
        """Give all memory back for good."""
        ...


class PlainMemory:
    """Implements ``FlatMemory`` with what torch itself allocates."""

    keeps_addresses_by_itself = False

    def __init__(self, device: torch.device) -> None:
        self._device = device

    @property
    def keeps_addresses(self) -> bool:
        return self._device.type == "cpu"

    def zeros(self, count: int, dtype: torch.dtype) -> Tensor:
        return torch.zeros(count, dtype=dtype, device=self._device)

    def release(self, tensors: Iterable[Tensor]) -> None:
        for tensor in tensors:
            if self._device.type == "cpu":
                give_back_pages(tensor.data_ptr(), tensor.nbytes)
            else:
                tensor.untyped_storage().resize_(0)

    def back(self, tensors: Iterable[Tensor]) -> None:
        if self._device.type != "cpu":
            for tensor in tensors:
                tensor.untyped_storage().resize_(tensor.nbytes)

    def taken_bytes(self, size: int) -> int:
        return size

    def close(self) -> None:
        """Do nothing: torch frees the memory with the tensors."""

    def released_bytes(self, sizes: Iterable[int]) -> int:
        if self._device.type != "cpu":
            return 0
        return sum(min(size, 2 * mmap.PAGESIZE) if sys.platform == "linux" else size for size in sizes)


class MappedMemory:
    """Implements ``FlatMemory`` with reserved addresses of a CUDA device."""

    keeps_addresses = keeps_addresses_by_itself = True

    def __init__(self, mapping: CudaMapping, device: torch.device) -> None:
        self._mapping = mapping
        self._device = device

    def zeros(self, count: int, dtype: torch.dtype) -> Tensor:
        raw = self._mapping.reserve(max(1, count * dtype.itemsize))
        self._had(raw.address)
        tensor = torch.as_tensor(raw, device=self._device)
        if tensor.data_ptr() != raw.address:
            raise MappingFailed("torch copied the reserved memory instead of using it")
        return tensor.view(dtype)[:count].zero_()

    def release(self, tensors: Iterable[Tensor]) -> None:
        torch.cuda.synchronize(self._device)
        for tensor in tensors:
            self._mapping.unmap(tensor.data_ptr())

    def back(self, tensors: Iterable[Tensor]) -> None:
        for tensor in tensors:
            self._had(tensor.data_ptr())

    def _had(self, address: int) -> None:
        try:
            self._mapping.map(address)
        except MappingFailed:
            torch.cuda.empty_cache()  # torch keeps memory that activations have used, though it is free
            self._mapping.map(address)

    def taken_bytes(self, size: int) -> int:
        return self._mapping.taken_bytes(size)

    def close(self) -> None:
        torch.cuda.synchronize(self._device)
        self._mapping.close()

    def released_bytes(self, sizes: Iterable[int]) -> int:
        return 0


def flat_memory(device: torch.device, *, parkable: bool) -> FlatMemory:
    """The memory for a backend's buffers, mapped if that is wanted and works."""
    if parkable and device.type == "cuda":
        torch.zeros(1, device=device)  # makes the device's context, on this thread
        try:
            memory = MappedMemory(CudaMapping(torch.cuda.current_device()), device)
            probe = memory.zeros(1, torch.float32)
            memory.release([probe])
            memory.back([probe])
            works = int(probe.fill_(1).sum()) == 1
            memory.release([probe])
            if works:
                return memory
        except (MappingFailed, RuntimeError, OSError):
            pass
    return PlainMemory(device)
