"""What can be asked of a model or a sampling session, and what is answered, as the operation log keeps it.

Requests of clients become these records at the door (``wire.py``), and answers become the clients' messages when they
are fetched. The log therefore outlives versions of the client.
"""

from __future__ import annotations

from typing import Any, Final

import msgspec
import numpy as np

from actors.protocol.datums import Datum
from actors.protocol.training import AdamStep
from actors.tinker.sampling import Sampled, SampledSequence, SamplingParameters, TopTokens


class Array(msgspec.Struct, frozen=True, array_like=True):
    """Holds an array as bytes, little-endian."""

    dtype: str
    shape: tuple[int, ...]
    data: bytes

    @classmethod
    def of(cls, array: np.ndarray) -> Array:
        return cls(array.dtype.newbyteorder("<").str, array.shape, np.ascontiguousarray(array).tobytes())

    def array(self) -> np.ndarray:
        return np.frombuffer(self.data, self.dtype).reshape(self.shape)


class DatumRecord(msgspec.Struct, frozen=True, array_like=True):
    """Holds a datum."""

    tokens: Array
    targets: Array
    columns: dict[str, Array]

    @classmethod
    def of(cls, datum: Datum) -> DatumRecord:
        columns = {name: Array.of(column) for name, column in datum.columns.items()}
        return cls(Array.of(datum.tokens), Array.of(datum.targets), columns)

    def datum(self) -> Datum:
        columns = {name: column.array() for name, column in self.columns.items()}
        return Datum(self.tokens.array(), self.targets.array(), columns)


# ------------------------------------------------------------ what is asked


class Create(msgspec.Struct, frozen=True, tag="create"):
    """Makes the model, with new weights."""


class Load(msgspec.Struct, frozen=True, tag="load"):
    """Takes over saved weights; ``creates``: as the model's first operation."""

    path: str
    directory: str
    optimizer: bool
    creates: bool


class ForwardBackward(msgspec.Struct, frozen=True, tag="forward_backward"):
    """Computes a loss, and unless ``forward_only`` its gradient."""

    datums: list[DatumRecord]
    loss: str
    parameters: dict[str, float]
    forward_only: bool


class OptimStep(msgspec.Struct, frozen=True, tag="optim_step"):
    """Takes one step."""

    adam: AdamStep


class Save(msgspec.Struct, frozen=True, tag="save"):
    """Saves weights and optimizer under a name."""

    name: str
    overwrite: bool = False
    ttl_s: int | None = None


class Export(msgspec.Struct, frozen=True, tag="export"):
    """Saves weights for samplers: under a name, or for a new sampling session."""

    name: str | None = None
    session: str | None = None
    """Sampling session that is made, if there is no name."""
    in_flight: bool = False
    """Whether all sampling sessions of this model that were made so take the new weights, too."""
    ttl_s: int | None = None


class Sample(msgspec.Struct, frozen=True, tag="sample"):
    """Draws samples."""

    prompt: Array
    n: int
    parameters: SamplingParameters
    prompt_logprobs: bool = False
    last_prompt_logprobs: int | None = None
    """Number of tokens at the prompt's end that logprobs are told of; None: all."""
    topk: int = 0


class Refused(msgspec.Struct, frozen=True, tag="refused"):
    """Holds the place of a request that was wrong in itself, so that the numbers after it have their turn."""

    why: str


Operation = Create | Load | ForwardBackward | OptimStep | Save | Export | Sample | Refused


# ------------------------------------------------------------ what is answered


class Json(msgspec.Struct, frozen=True, tag="json"):
    """Holds an answer that the client reads as JSON."""

    value: dict[str, Any]


class Losses(msgspec.Struct, frozen=True, tag="losses"):
    """Holds the answer to ForwardBackward."""

    logprobs: list[Array]
    metrics: dict[str, float]

    @classmethod
    def of(cls, logprobs: list[np.ndarray], metrics: dict[str, float]) -> Losses:
        return cls([Array.of(one) for one in logprobs], metrics)


class SequenceRecord(msgspec.Struct, frozen=True, array_like=True):
    """Holds one sampled sequence."""

    stopped: bool
    tokens: Array
    logprobs: Array
    top_tokens: Array | None = None
    top_logprobs: Array | None = None

    @classmethod
    def of(cls, one: SampledSequence) -> SequenceRecord:
        top = (None, None) if one.top is None else (Array.of(one.top.tokens), Array.of(one.top.logprobs))
        return cls(one.stopped, Array.of(one.tokens), Array.of(one.logprobs), *top)

    def sequence(self) -> SampledSequence:
        return SampledSequence(
            self.stopped, self.tokens.array(), self.logprobs.array(), _top(self.top_tokens, self.top_logprobs)
        )


def _top(tokens: Array | None, logprobs: Array | None) -> TopTokens | None:
    return None if tokens is None or logprobs is None else TopTokens(tokens.array(), logprobs.array())


class Samples(msgspec.Struct, frozen=True, tag="samples"):
    """Holds the answer to Sample."""

    sequences: list[SequenceRecord]
    prompt_logprobs: Array | None = None
    top_tokens: Array | None = None
    top_logprobs: Array | None = None

    @classmethod
    def of(cls, sampled: Sampled) -> Samples:
        sequences = [SequenceRecord.of(one) for one in sampled.sequences]
        prompt = None if sampled.prompt_logprobs is None else Array.of(sampled.prompt_logprobs)
        top = sampled.prompt_top
        if top is None:
            return cls(sequences, prompt)
        return cls(sequences, prompt, Array.of(top.tokens), Array.of(top.logprobs))

    def sampled(self) -> Sampled:
        sequences = [one.sequence() for one in self.sequences]
        prompt = None if self.prompt_logprobs is None else self.prompt_logprobs.array()
        return Sampled(sequences, prompt, _top(self.top_tokens, self.top_logprobs))


class Failed(msgspec.Struct, frozen=True, tag="failed"):
    """Holds why an operation failed; ``of_user``: by what was asked, and not by what happened here."""

    error: str
    of_user: bool


Answer = Json | Losses | Samples | Failed


def kind_of(operation: Operation) -> str:
    """What an operation is called in ``events.jsonl``: ``forward_backward``, for one."""
    return str(operation.__struct_config__.tag)


def training_tokens(operation: Operation) -> int:
    """Number of tokens that the trainer computes for it."""
    return sum(one.tokens.shape[0] for one in operation.datums) if isinstance(operation, ForwardBackward) else 0


def sampled_tokens(answer: Answer) -> int:
    return sum(one.tokens.shape[0] for one in answer.sequences) if isinstance(answer, Samples) else 0


_OPERATION: Final = msgspec.msgpack.Decoder(Operation)
_ANSWER: Final = msgspec.msgpack.Decoder(Answer)


def encode(record: Operation | Answer) -> bytes:
    return msgspec.msgpack.encode(record)


def read_operation(data: bytes) -> Operation:
    return _OPERATION.decode(data)


def read_answer(data: bytes) -> Answer:
    return _ANSWER.decode(data)
