"""Addresses of a CUDA device that outlive the memory behind them, through the driver's virtual memory management.

    reserve ─▶ addresses ─ map ─▶ memory behind them ─ unmap ─▶ addresses ─ map ─▶ other memory behind the same ones

Torch takes no part: it only gets a tensor over the addresses. The layout of the structures is the driver's (cuda.h).
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import Any, Final

from actors.trainer.errors import TrainerError

_PINNED: Final = 1  # CU_MEM_ALLOCATION_TYPE_PINNED: memory of the device
_DEVICE: Final = 1  # CU_MEM_LOCATION_TYPE_DEVICE
_READ_WRITE: Final = 3  # CU_MEM_ACCESS_FLAGS_PROT_READWRITE


class MappingFailed(TrainerError):
    """The driver cannot map memory (``PlainMemory`` is used instead), or the device has no memory left."""


class _Location(ctypes.Structure):
    _fields_ = (("type", ctypes.c_int), ("id", ctypes.c_int))


class _Flags(ctypes.Structure):
    _fields_ = (
        ("compression", ctypes.c_ubyte),
        ("gpu_direct_rdma", ctypes.c_ubyte),
        ("usage", ctypes.c_ushort),
        ("reserved", ctypes.c_ubyte * 4),
    )


class _Properties(ctypes.Structure):
    _fields_ = (
        ("type", ctypes.c_int),
        ("requested_handles", ctypes.c_int),
        ("location", _Location),
        ("windows_metadata", ctypes.c_void_p),
        ("flags", _Flags),
    )


class _Access(ctypes.Structure):
    _fields_ = (("location", _Location), ("flags", ctypes.c_int))


@dataclass(frozen=True, slots=True)
class Reserved:
    """Describes reserved addresses in the form in which torch takes memory of other libraries."""

    address: int
    size_bytes: int

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        return {"shape": (self.size_bytes,), "typestr": "|u1", "data": (self.address, False), "version": 2}


class CudaMapping:
    """Reserves, maps and unmaps; the device's context is current on the calling thread."""

    def __init__(self, device: int, driver: Any = None) -> None:
        """``driver``: a stand-in for the library, for tests.

        Raises:
            OSError: there is no driver.
            MappingFailed: the driver cannot map memory.
        """
        self._driver = driver or ctypes.CDLL("libcuda.so.1")
        location = _Location(_DEVICE, device)
        self._properties = _Properties(type=_PINNED, location=location)
        self._access = _Access(location, _READ_WRITE)
        granularity = ctypes.c_size_t()
        self._call("cuMemGetAllocationGranularity", ctypes.byref(granularity), ctypes.byref(self._properties), 0)
        self._granularity = granularity.value
        self._sizes: dict[int, int] = {}
        """Sizes in bytes of the reserved ranges, by address."""
        self._mapped: set[int] = set()

    def taken_bytes(self, size_bytes: int) -> int:
        """``size_bytes`` rounded up to the granularity of the device's memory."""
        return -(-size_bytes // self._granularity) * self._granularity

    def reserve(self, size_bytes: int) -> Reserved:
        """Addresses for ``size_bytes``, with nothing behind them."""
        size = self.taken_bytes(size_bytes)
        address = ctypes.c_uint64()
        self._call(
            "cuMemAddressReserve",
            ctypes.byref(address),
            ctypes.c_size_t(size),
            ctypes.c_size_t(0),
            ctypes.c_uint64(0),
            ctypes.c_uint64(0),
        )
        self._sizes[address.value] = size
        return Reserved(address.value, size_bytes)

    def map(self, address: int) -> None:
        """Put memory behind reserved addresses, either all of it or none."""
        size = ctypes.c_size_t(self._sizes[address])
        handle, at = ctypes.c_uint64(), ctypes.c_uint64(address)
        self._call("cuMemCreate", ctypes.byref(handle), size, ctypes.byref(self._properties), ctypes.c_uint64(0))
        try:
            self._call("cuMemMap", at, size, ctypes.c_size_t(0), handle, ctypes.c_uint64(0))
        finally:
            self._call("cuMemRelease", handle)  # the memory stays as long as it is mapped
        try:
            self._call("cuMemSetAccess", at, size, ctypes.byref(self._access), ctypes.c_size_t(1))
        except MappingFailed:
            self._call("cuMemUnmap", at, size)
            raise
        self._mapped.add(address)

    def unmap(self, address: int) -> None:
        """Give the memory back, if there is any; nothing on the device may use it any more."""
        if address in self._mapped:
            self._call("cuMemUnmap", ctypes.c_uint64(address), ctypes.c_size_t(self._sizes[address]))
            self._mapped.remove(address)

    def close(self) -> None:
        """Give back all memory and all addresses: tensors over them must not be used again."""
        for address, size in self._sizes.items():
            self.unmap(address)
            self._call("cuMemAddressFree", ctypes.c_uint64(address), ctypes.c_size_t(size))
        self._sizes.clear()

    def _call(self, name: str, *arguments: Any) -> None:
        try:
            code = int(getattr(self._driver, name)(*arguments))
        except AttributeError as error:
            raise MappingFailed(f"the CUDA driver has no {name}") from error
        if code:
            raise MappingFailed(f"{name} ended with the driver's error {code}")
