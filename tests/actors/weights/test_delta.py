"""Deltas of chunks: bit-exact, small where little changed, none where much did, and nothing but errors from garbage."""

from __future__ import annotations

import contextlib

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from actors.weights.delta import apply_delta, encode_delta, word_bytes
from actors.weights.errors import MalformedDelta


def applied(delta: bytes, old: bytes) -> bytes:
    place = bytearray(len(old))
    apply_delta(delta, old, memoryview(place))
    return bytes(place)


@given(st.integers(0, 400), st.sampled_from([1, 2, 4, 8]), st.floats(0, 1), st.integers(0, 2**32 - 1))
def test_what_comes_out_is_what_went_in(words: int, width: int, share: float, seed: int) -> None:
    """Whatever the words, their width and how many changed: the same bits, or no delta at all."""
    rng = np.random.default_rng(seed)
    old = rng.integers(0, 256, words * width, np.uint8)
    new = np.where(rng.random(len(old)) < share, rng.integers(0, 256, len(old), np.uint8), old)
    delta = encode_delta(new, old, width)
    if delta is not None:
        assert applied(delta, old.tobytes()) == new.tobytes()


@given(st.binary(max_size=200), st.binary(min_size=1, max_size=64))
def test_garbage_is_no_delta(garbage: bytes, old: bytes) -> None:
    """Whatever comes from the wire, nothing but MalformedDelta is raised and no byte outside the place is written."""
    with contextlib.suppress(MalformedDelta):
        assert len(applied(garbage, old)) == len(old)


@given(st.data())
def test_a_delta_with_a_wrong_byte_is_refused_or_gives_a_chunk_of_the_same_size(data: st.DataObject) -> None:
    """The hash of the chunk decides about what can still be applied."""
    old = np.zeros(256, np.uint16)
    new = old.copy()
    new[::16] = 1
    delta = bytearray(encode_delta(new, old, 2) or b"")
    delta[data.draw(st.integers(0, len(delta) - 1))] ^= data.draw(st.integers(1, 255))
    with contextlib.suppress(MalformedDelta):
        assert len(applied(bytes(delta), old.tobytes())) == 512


def test_one_bfloat16_weight_in_a_hundred_costs_less_than_two_percent_of_the_bytes() -> None:
    """The last bit of 1 % of the words, at random places."""
    rng = np.random.default_rng(0)
    old = rng.integers(0, 2**16, 1 << 20, np.uint16)
    new = old ^ (rng.random(len(old)) < 0.01).astype(np.uint16)
    delta = encode_delta(new, old, 2)
    assert delta is not None
    assert len(delta) < 0.02 * new.nbytes
    assert applied(delta, old.tobytes()) == new.tobytes()


def test_where_everything_changed_there_is_no_delta() -> None:
    rng = np.random.default_rng(0)
    old, new = (rng.integers(0, 2**16, 4096, np.uint16) for _ in range(2))
    assert encode_delta(new, old, 2) is None


def test_a_delta_against_other_bytes_gives_other_bytes() -> None:
    """XOR tells what changed, not what it became: so a wrong base is found out by the hash."""
    old = np.zeros(1024, np.uint16)
    new = old.copy()
    new[7] = 9
    delta = encode_delta(new, old, 2)
    assert delta is not None
    assert applied(delta, np.full(1024, 5, np.uint16).tobytes()) != new.tobytes()


@pytest.mark.parametrize(("sizes", "width"), [((2, 4096, 8192), 2), ((2, 4096, 8191), 1), ((4, 4096), 4)])
def test_words_are_as_wide_as_the_elements_where_every_chunk_is_a_whole_number_of_them(
    sizes: tuple[int, ...], width: int
) -> None:
    assert word_bytes({sizes[0]}, *sizes[1:]) == width
    assert word_bytes({2, 4}, *sizes[1:]) == 1
