"""Bytes that open a hundred thousand lists are an error like any other, wherever they come in."""

from __future__ import annotations

from typing import Any

import pytest

from transport.codec import decode_body
from transport.envelope import Envelope, Kind, decode_envelope, encode_envelope
from transport.errors import MalformedBody, MalformedEnvelope, MalformedInput
from transport.zmq.handshake import HEAD, Confirm, Mark, read_control

DEEP = b"\x91" * 100_000 + b"\xc0"


def test_a_deeply_nested_body_is_malformed_and_nothing_worse() -> None:
    kind: Any = list
    with pytest.raises(MalformedBody, match="recursion"):
        decode_body(kind, [DEEP])


def test_a_deeply_nested_envelope_is_malformed_and_nothing_worse() -> None:
    """In a field that a newer peer might have added, which is skipped."""
    plain = encode_envelope(Envelope(kind=Kind.TELL))
    assert plain[0] == 0x9F, "an array of 15"
    with pytest.raises(MalformedEnvelope, match="recursion"):
        decode_envelope(b"\xdc\x00\x10" + plain[1:] + DEEP)


def test_a_deeply_nested_handshake_is_malformed_and_nothing_worse() -> None:
    """Also in a field that a newer peer might have added."""
    with pytest.raises(MalformedInput, match="recursion"):
        read_control(Confirm, [HEAD.pack(Mark.CONFIRM, 0), b"\x93\x01\x03" + DEEP])
