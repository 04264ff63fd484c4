"""Encodes typed bodies for the wire: MessagePack for structure, raw frames for arrays.

Invariants
- Plain ``msgpack.unpackb`` can read a body; it shows an array as ExtType 1 or 2.
- An array of at least ``INLINE_ARRAY_BYTES`` travels as a raw frame beside the body and is neither copied
  nor parsed; a smaller one is inlined, since a frame of its own costs more than the copy.
- Decoding trusts nothing: dtype, shape, frame index and length are checked; a mismatch raises MalformedBody.

Body layout::

    body    = msgpack(struct as array, tag first)
    array   = Ext(1, msgpack([dtype, shape, frame index]))        large: bytes are frames[index]
            | Ext(2, msgpack([dtype, shape, bytes]))              small: bytes are inline
"""

from __future__ import annotations

import math
import threading
from collections.abc import Sequence
from typing import Any, Final, TypeVar, cast

import msgspec
import numpy as np

from transport.errors import MalformedBody
from transport.transport import Frame

T = TypeVar("T")

INLINE_ARRAY_BYTES: Final = 512
FRAME_ARRAY: Final = 1
INLINE_ARRAY: Final = 2
_DTYPES: Final = frozenset(["|u1", "|i1", "|b1", "<i2", "<u2", "<i4", "<u4", "<i8", "<u8", "<f2", "<f4", "<f8"])


class _FrameArray(msgspec.Struct, array_like=True):
    dtype: str
    shape: list[int]
    index: int


class _InlineArray(msgspec.Struct, array_like=True):
    dtype: str
    shape: list[int]
    data: bytes


_frame_decoder = msgspec.msgpack.Decoder(_FrameArray)
_inline_decoder = msgspec.msgpack.Decoder(_InlineArray)
_plain = msgspec.msgpack.Encoder()


def encode_body(value: object) -> list[Frame]:
    """Encode ``value``; returns the body frame followed by the raw array frames."""
    writers: dict[str, _Writer] = _writers.__dict__
    writer = writers.get("writer") or writers.setdefault("writer", _Writer())
    return writer.write(value)


class _Writer:
    """Wraps an encoder, which is kept since making one costs more than using it; each thread has its own."""

    def __init__(self) -> None:
        self._encoder = msgspec.msgpack.Encoder(enc_hook=self._hook)
        self._raws: list[Frame] = []

    def write(self, value: object) -> list[Frame]:
        try:
            body = self._encoder.encode(value)
            return [body, *self._raws] if self._raws else [body]
        finally:
            if self._raws:
                self._raws = []

    def _hook(self, item: object) -> msgspec.msgpack.Ext:
        if isinstance(item, np.ndarray):
            return _encode_array(cast("np.ndarray[Any, Any]", item), self._raws)
        raise TypeError(
            f"cannot send a {type(item).__name__}: only msgspec structs, plain values and numpy arrays travel"
        )


_writers = threading.local()


def _encode_array(array: np.ndarray[Any, Any], raws: list[Frame]) -> msgspec.msgpack.Ext:
    shape = list(array.shape)  # ascontiguousarray gives a scalar one dimension
    array = np.ascontiguousarray(array)
    dtype = array.dtype.newbyteorder("<") if array.dtype.byteorder == ">" else array.dtype
    array = array.astype(dtype, copy=False)
    if dtype.str not in _DTYPES:
        raise TypeError(f"cannot send an array of dtype {dtype}: use one of {sorted(_DTYPES)}")
    if array.nbytes < INLINE_ARRAY_BYTES:
        return msgspec.msgpack.Ext(INLINE_ARRAY, _plain.encode(_InlineArray(dtype.str, shape, array.tobytes())))
    raws.append(array.reshape(-1).view(np.uint8).data)
    return msgspec.msgpack.Ext(FRAME_ARRAY, _plain.encode(_FrameArray(dtype.str, shape, len(raws) - 1)))


def decode_body(kind: type[T], frames: Sequence[Frame]) -> T:
    """Decode the body in ``frames[0]`` as ``kind``; arrays are read-only views of ``frames[1:]``.

    Raises:
        MalformedBody: the bytes are no MessagePack, do not fit ``kind``, or an array does not fit its frame.
    """
    readers: dict[Any, _Reader] = _readers.__dict__
    reader = readers.get(kind) or readers.setdefault(kind, _Reader(kind))
    try:
        return cast("T", reader.read(frames))
    except (msgspec.DecodeError, ValueError, TypeError, IndexError, RecursionError) as error:
        name = getattr(kind, "__name__", str(kind))
        raise MalformedBody(f"a {name} could not be read: {error}") from error


class _Reader:
    """Wraps a decoder of one type, which is kept since making one costs more than using it; one per thread."""

    def __init__(self, kind: Any) -> None:
        self._decoder = msgspec.msgpack.Decoder(kind, ext_hook=self._ext, dec_hook=_check_array)
        self._raws: Sequence[Frame] = ()

    def read(self, frames: Sequence[Frame]) -> object:
        if len(frames) == 1:
            return self._decoder.decode(frames[0])
        self._raws = frames[1:]
        try:
            return self._decoder.decode(frames[0])
        finally:
            self._raws = ()

    def _ext(self, code: int, data: memoryview) -> object:
        if code == FRAME_ARRAY:
            head = _frame_decoder.decode(data)
            if not 0 <= head.index < len(self._raws):
                raise ValueError(f"array frame {head.index} is missing: the message has {len(self._raws)}")
            return _view(head.dtype, head.shape, self._raws[head.index])
        if code == INLINE_ARRAY:
            inline = _inline_decoder.decode(data)
            return _view(inline.dtype, inline.shape, inline.data)
        raise ValueError(f"unknown extension {code}")


_readers = threading.local()


def _view(dtype: str, shape: list[int], data: Frame) -> np.ndarray[Any, Any]:
    if dtype not in _DTYPES:
        raise ValueError(f"dtype {dtype!r} is not allowed")
    if any(n < 0 for n in shape) or len(shape) > 8:
        raise ValueError(f"shape {shape} is not allowed")
    want = math.prod(shape) * np.dtype(dtype).itemsize
    have = memoryview(data).nbytes
    if want != have:
        raise ValueError(f"shape {shape} of {dtype} needs {want} bytes, the frame has {have}")
    array = np.frombuffer(data, dtype=dtype).reshape(shape)
    array.flags.writeable = False
    return array


def _check_array(kind: type, value: object) -> object:
    if isinstance(value, np.ndarray):
        return cast("np.ndarray[Any, Any]", value)
    raise ValueError(f"expected {kind.__name__}, got {type(value).__name__}")
