"""The header survives the wire, plain msgpack reads it, and bad headers are errors with a reason."""

from __future__ import annotations

import msgpack
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from transport.envelope import ENVELOPE_VERSION, Envelope, Kind, decode_envelope, encode_envelope
from transport.errors import MalformedEnvelope

names = st.text(max_size=30)
numbers = st.integers(0, 2**63 - 1)
envelopes = st.builds(
    Envelope,
    kind=st.sampled_from(Kind),
    source=names,
    target=names,
    target_incarnation=numbers,
    request_id=numbers,
    attempt=numbers,
    term=numbers,
    deadline_ms=st.integers(-1, 2**40),
    job=names,
    trace_id=numbers,
    parent_id=numbers,
    tag=names,
    number=numbers,
)


@settings(max_examples=100, deadline=None)
@given(envelopes)
def test_an_envelope_comes_back_as_it_was_and_plain_msgpack_reads_it(envelope: Envelope) -> None:
    frame = encode_envelope(envelope)
    assert decode_envelope(frame) == decode_envelope(memoryview(frame)) == envelope
    assert msgpack.unpackb(frame)[:4] == [ENVELOPE_VERSION, int(envelope.kind), envelope.source, envelope.target]


@settings(max_examples=300, deadline=None)
@given(st.binary(max_size=100))
def test_random_bytes_are_a_malformed_envelope_and_nothing_worse(frame: bytes) -> None:
    with pytest.raises(MalformedEnvelope):
        decode_envelope(frame)


def test_a_field_that_a_newer_peer_has_added_is_ignored() -> None:
    fields = msgpack.unpackb(encode_envelope(Envelope(kind=Kind.TELL, target="x")))
    assert decode_envelope(msgpack.packb([*fields, "new"])).target == "x"


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ([2, 1], "this process is older"),
        ([0, 1], "the sender is older"),
        ([1, 99], "99"),
        ([1, 1, "a" * 257], "256"),
        ([1, 1, "a", "b", -5], ">= 0"),
        ([1, 1, "a", "b", 0, 0, 0, 0, -2], ">= -1"),
        ([1], "missing required|at least"),
    ],
)
def test_a_bad_header_says_what_is_wrong(fields: list[object], why: str) -> None:
    with pytest.raises(MalformedEnvelope, match=why):
        decode_envelope(msgpack.packb(fields))
