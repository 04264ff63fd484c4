"""What the leader of a tensor parallel engine tells its followers, as bytes.

    Begin ─▶ [ Step · Load · Sleep ─▶ Wake ]*        each with what was added and aborted since the last one

An answer says what a rank has drawn, as a hash, and why it could not do what it was told.

Weights are not sent: an order names the file that they lie in, which the leader holds open until all have read it.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO, Any, Literal

import msgspec
import numpy as np
import xxhash

from actors.protocol.weights import TensorEntry
from actors.rollout.engine import EngineSpec, GenerationRequest, StepOutput, WeightTensors
from actors.weights.manifest import SegmentViews, entry_views, layout
from actors.weights.memory import map_file
from actors.weights.segments import open_ours, segment_directory


class Add(msgspec.Struct, frozen=True, tag=True):
    requests: list[GenerationRequest]


class Abort(msgspec.Struct, frozen=True, tag=True):
    requests: list[int]


class Begin(msgspec.Struct, frozen=True, tag=True):
    """The first order of a life: start the engine of ``spec``, meeting the others in ``directory``."""

    spec: EngineSpec
    directory: Path
    silence_s: float


class Step(msgspec.Struct, frozen=True, tag=True):
    pass


class Load(msgspec.Struct, frozen=True, tag=True):
    """Serve the version whose tensors lie in ``file`` as ``entries`` say."""

    file: str
    entries: tuple[TensorEntry, ...]
    policy_version: int
    in_flight: Literal["keep", "recompute"]


class Sleep(msgspec.Struct, frozen=True, tag=True):
    level: int


class Wake(msgspec.Struct, frozen=True, tag=True):
    """Ranks that have let go of each other meet again in ``directory``."""

    directory: Path


class Order(msgspec.Struct, frozen=True):
    commands: list[Add | Abort]
    call: Begin | Step | Load | Sleep | Wake


class Answer(msgspec.Struct, frozen=True):
    drawn: bytes = b""
    """Hash of what a step has drawn."""
    refusal: str = ""
    error: str = ""
    """Name of the class of the error that ``refusal`` is the text of."""


def encoded(message: Order | Answer) -> bytes:
    return msgspec.msgpack.encode(message, enc_hook=_plain)


def decoded_order(data: bytes) -> Order:
    return msgspec.msgpack.decode(data, type=Order, dec_hook=_from_plain)


def decoded_answer(data: bytes) -> Answer:
    return msgspec.msgpack.decode(data, type=Answer)


def is_refusal(answer: bytes) -> bool:
    return bool(decoded_answer(answer).refusal)


def _plain(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return value.astype(np.int32).tobytes()
    if isinstance(value, Path):
        return str(value)
    raise NotImplementedError(f"{type(value).__name__} is in no order")


def _from_plain(kind: type, value: Any) -> Any:
    if kind is np.ndarray:
        return np.frombuffer(value, np.int32)
    return Path(value)


def hash_of(output: StepOutput) -> bytes:
    """A hash that is the same in ranks that have drawn the same tokens for the same requests."""
    digest = xxhash.xxh3_64()
    for column in (output.requests, output.offsets, output.counts, output.finished, output.tokens):
        digest.update(np.ascontiguousarray(column).tobytes())
    return digest.digest()


@contextlib.contextmanager
def as_file(tensors: WeightTensors, dtypes: Mapping[str, str]) -> Iterator[tuple[str, tuple[TensorEntry, ...]]]:
    """A name under which processes of this machine open the file that ``tensors`` lie in, and where in it they lie.

    Tensors that lie in no file, or in one that is gone, are written to one that has no name and goes with this.
    """
    file, entries = _segment(tensors) or _written(tensors, dtypes)
    with file:
        yield f"/proc/{os.getpid()}/fd/{file.fileno()}", entries


_Placed = tuple[IO[bytes], tuple[TensorEntry, ...]]


def _segment(tensors: WeightTensors) -> _Placed | None:
    if isinstance(tensors, SegmentViews):
        with contextlib.suppress(OSError):  # its version has retired
            return open_ours(tensors.path, "rb"), tensors.entries
    return None


def _written(tensors: WeightTensors, dtypes: Mapping[str, str]) -> _Placed:
    entries, size = layout([(name, dtypes[name], array.shape) for name, array in tensors.items()])
    file = tempfile.TemporaryFile(dir=segment_directory())  # noqa: SIM115  it is handed out
    file.truncate(size)
    for entry in entries:
        file.seek(entry.offset_bytes)
        file.write(np.ascontiguousarray(tensors[entry.name]).reshape(-1).view(np.uint8).data)
    file.flush()
    return file, entries


@contextlib.contextmanager
def read(load: Load) -> Iterator[dict[str, np.ndarray]]:
    """The tensors of the leader's file, mapped."""
    with Path(load.file).open("rb") as file:
        views = entry_views(load.entries, map_file(file))
    yield views
    views.clear()
