"""A request is read with suspicion, before any verb sees it."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest

from actors.control import protocol
from actors.control.errors import MalformedRequest


def test_a_deeply_nested_request_is_malformed_and_nothing_worse() -> None:
    head = b"\x84\xa1v\x01\xa2id\x01\xa2op\xa4ping\xa4args\x81\xa1a"
    deep = head + b"\x91" * 100_000 + b"\xc0"
    with pytest.raises(MalformedRequest, match="recursion"):
        protocol.read_request(deep, max_bytes=1 << 20)
    assert protocol.request_id_of(deep, max_bytes=1 << 20) is None


def test_numbers_of_numpy_in_a_row_reach_whoever_watches_as_numbers() -> None:
    row = {"reward_mean": np.float64(0.5), "step": np.int64(3), "entropy": np.float32(0.25)}
    assert msgspec.msgpack.decode(protocol.event_frame(1, row))["event"] == {
        "reward_mean": 0.5, "step": 3, "entropy": 0.25,
    }  # fmt: skip
    with pytest.raises(TypeError, match="object is no plain value"):
        protocol.result_frame(1, object())
