"""What is asked of the CUDA driver, with one that only counts; whether a card does it, the parkable contract asks."""

from __future__ import annotations

import ctypes
from typing import Any

import pytest

from actors.trainer.backends.torch.cuda_mapping import CudaMapping, MappingFailed

PIECE = 2 << 20


class Driver:
    """Knows reserved addresses and what is mapped; ``fails``: the function that ends with an error."""

    def __init__(self) -> None:
        self.reserved: dict[int, int] = {}
        self.mapped: dict[int, int] = {}
        self.handles: set[int] = set()
        self.usable: set[int] = set()
        self.fails = ""
        self._next = 0

    def _done(self, name: str) -> int:
        return 2 if self.fails == name else 0

    def cuMemGetAllocationGranularity(self, size: Any, properties: Any, _: int) -> int:  # noqa: N802
        assert (properties._obj.type, properties._obj.location.type, properties._obj.location.id) == (1, 1, 3)
        assert ctypes.sizeof(properties._obj) == 32
        size._obj.value = PIECE
        return 0

    def cuMemAddressReserve(self, address: Any, size: Any, *_: Any) -> int:  # noqa: N802
        self._next += 1 << 32
        address._obj.value = self._next
        self.reserved[self._next] = size.value
        return self._done("reserve")

    def cuMemAddressFree(self, address: Any, size: Any) -> int:  # noqa: N802
        assert address.value not in self.mapped
        assert self.reserved.pop(address.value) == size.value
        return 0

    def cuMemCreate(self, handle: Any, size: Any, *_: Any) -> int:  # noqa: N802
        if self.fails != "create":
            self._next += 1
            handle._obj.value = self._next
            self.handles.add(self._next)
        return self._done("create")

    def cuMemMap(self, address: Any, size: Any, offset: Any, handle: Any, _: Any) -> int:  # noqa: N802
        assert handle.value in self.handles
        assert self.reserved[address.value] == size.value
        assert offset.value == 0
        if self.fails != "map":
            assert address.value not in self.mapped
            self.mapped[address.value] = size.value
        return self._done("map")

    def cuMemRelease(self, handle: Any) -> int:  # noqa: N802
        self.handles.remove(handle.value)
        return 0

    def cuMemSetAccess(self, address: Any, size: Any, access: Any, count: Any) -> int:  # noqa: N802
        assert (access._obj.flags, count.value) == (3, 1)
        self.usable.add(address.value)
        return self._done("access")

    def cuMemUnmap(self, address: Any, size: Any) -> int:  # noqa: N802
        assert self.mapped.pop(address.value) == size.value
        self.usable.discard(address.value)
        return 0


@pytest.fixture
def driver() -> Driver:
    return Driver()


def test_memory_comes_back_behind_the_same_addresses(driver: Driver) -> None:
    mapping = CudaMapping(3, driver)
    raw = mapping.reserve(PIECE + 1)
    assert raw.__cuda_array_interface__["data"] == (raw.address, False)
    assert raw.__cuda_array_interface__["shape"] == (PIECE + 1,)
    assert mapping.taken_bytes(PIECE + 1) == 2 * PIECE
    for _ in range(3):
        mapping.map(raw.address)
        assert driver.mapped == {raw.address: 2 * PIECE}
        assert driver.usable == {raw.address}
        assert driver.handles == set()  # the mapping alone holds the memory
        mapping.unmap(raw.address)
        mapping.unmap(raw.address)
        assert driver.mapped == {}


@pytest.mark.parametrize("function", ["create", "map", "access"])
def test_what_fails_leaves_nothing_mapped_and_nothing_held(driver: Driver, function: str) -> None:
    mapping = CudaMapping(3, driver)
    raw = mapping.reserve(100)
    driver.fails = function
    with pytest.raises(MappingFailed, match="error 2"):
        mapping.map(raw.address)
    assert (driver.mapped, driver.handles) == ({}, set())
    driver.fails = ""
    mapping.map(raw.address)
    mapping.close()
    assert (driver.mapped, driver.reserved) == ({}, {})


def test_a_driver_that_lacks_it_is_said_to() -> None:
    with pytest.raises(MappingFailed, match="has no cuMemGetAllocationGranularity"):
        CudaMapping(0, object())
