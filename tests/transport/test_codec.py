"""The codec gives back what it was given, plain msgpack can read it, and bad bytes are an error and nothing else."""

from __future__ import annotations

import msgpack
import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from transport.codec import INLINE_ARRAY_BYTES, decode_body, encode_body
from transport.errors import MalformedBody

DTYPES = ["|u1", "|i1", "|b1", "<i2", "<u2", "<i4", "<u4", "<i8", "<u8", "<f2", "<f4", "<f8"]


class Inner(msgspec.Struct, array_like=True, frozen=True):
    name: str
    score: float


class Sample(msgspec.Struct, frozen=True, kw_only=True):
    job: str
    step: int
    inners: list[Inner]
    note: str | None = None
    tokens: np.ndarray
    logprobs: np.ndarray


arrays = st.sampled_from(DTYPES).flatmap(
    lambda dtype: hnp.arrays(np.dtype(dtype), hnp.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=20))
)
samples = st.builds(
    Sample,
    job=st.text(max_size=20),
    step=st.integers(-(2**63), 2**63 - 1),
    inners=st.lists(st.builds(Inner, name=st.text(max_size=5), score=st.floats(allow_nan=False)), max_size=4),
    note=st.none() | st.text(max_size=5),
    tokens=arrays,
    logprobs=arrays,
)


def same(left: np.ndarray, right: np.ndarray) -> bool:
    return left.dtype == right.dtype and left.shape == right.shape and left.tobytes() == right.tobytes()


@settings(max_examples=60, deadline=None)
@given(samples)
def test_a_body_comes_back_as_it_was(sample: Sample) -> None:
    back = decode_body(Sample, [bytes(frame) for frame in encode_body(sample)])
    assert (back.job, back.step, back.inners, back.note) == (sample.job, sample.step, sample.inners, sample.note)
    assert same(back.tokens, sample.tokens)
    assert same(back.logprobs, sample.logprobs)


@settings(max_examples=60, deadline=None)
@given(samples)
def test_plain_msgpack_reads_what_we_send(sample: Sample) -> None:
    body = msgpack.unpackb(bytes(encode_body(sample)[0]), strict_map_key=False)
    assert body["job"] == sample.job
    tokens = body["tokens"]
    assert tokens.code in (1, 2)
    dtype, shape, _ = msgpack.unpackb(tokens.data)
    assert (dtype, shape) == (sample.tokens.dtype.str, list(sample.tokens.shape))


def test_a_large_array_travels_beside_the_body_without_a_copy_and_comes_back_read_only() -> None:
    tokens = np.arange(INLINE_ARRAY_BYTES, dtype=np.int32)
    sample = Sample(job="j", step=1, inners=[], tokens=tokens, logprobs=np.zeros(2, np.float32))
    frames = encode_body(sample)
    assert len(frames) == 2
    assert np.shares_memory(np.frombuffer(frames[1], np.int32), tokens)
    back = decode_body(Sample, frames)
    assert np.shares_memory(back.tokens, tokens)
    with pytest.raises(ValueError, match="read-only"):
        back.tokens[0] = 1


def test_big_endian_and_strided_arrays_are_made_plain() -> None:
    odd = np.arange(10, dtype=">i4")[::2]
    back = decode_body(Sample, encode_body(Sample(job="", step=0, inners=[], tokens=odd, logprobs=odd)))
    assert back.tokens.dtype.str == "<i4"
    assert back.tokens.tolist() == [0, 2, 4, 6, 8]


@pytest.mark.parametrize("value", [object(), np.array(["a"]), np.array([1j]), {"x": {1, object()}}])
def test_what_cannot_travel_is_refused_at_the_sender(value: object) -> None:
    with pytest.raises(TypeError):
        encode_body(value)


@settings(max_examples=200, deadline=None)
@given(st.lists(st.binary(max_size=200), min_size=1, max_size=3))
def test_random_bytes_are_malformed_and_nothing_worse(frames: list[bytes]) -> None:
    with pytest.raises(MalformedBody):
        decode_body(Sample, frames)


@settings(max_examples=200, deadline=None)
@given(samples, st.data())
def test_one_flipped_bit_is_an_error_or_another_value_and_nothing_worse(sample: Sample, data: st.DataObject) -> None:
    frames = [bytearray(frame) for frame in encode_body(sample)]
    victim = data.draw(st.sampled_from([frame for frame in frames if frame]))
    victim[data.draw(st.integers(0, len(victim) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    try:
        decode_body(Sample, [bytes(frame) for frame in frames])
    except MalformedBody:
        pass


@pytest.mark.parametrize(
    ("dtype", "shape", "index"),
    [
        ("<i4", [2**40], 0),
        ("<i4", [-1], 0),
        ("|O8", [1], 0),
        ("<i4", [256], 7),
        ("<i4", [256], -1),
        ("<i4", [1] * 9, 0),
    ],
)
def test_an_array_that_does_not_fit_its_frame_is_malformed(dtype: str, shape: list[int], index: int) -> None:
    ext = msgpack.ExtType(1, msgpack.packb([dtype, shape, index]))
    body = {"job": "", "step": 0, "inners": [], "tokens": ext, "logprobs": ext}
    with pytest.raises(MalformedBody):
        decode_body(Sample, [msgpack.packb(body), bytes(1024)])
