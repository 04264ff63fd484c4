"""A request is read with suspicion, before any verb sees it."""

from __future__ import annotations

import pytest

from actors.control import protocol
from actors.control.errors import MalformedRequest


def test_a_deeply_nested_request_is_malformed_and_nothing_worse() -> None:
    head = b"\x84\xa1v\x01\xa2id\x01\xa2op\xa4ping\xa4args\x81\xa1a"
    deep = head + b"\x91" * 100_000 + b"\xc0"
    with pytest.raises(MalformedRequest, match="recursion"):
        protocol.read_request(deep, max_bytes=1 << 20)
    assert protocol.request_id_of(deep, max_bytes=1 << 20) is None
