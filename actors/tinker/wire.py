"""The client's messages: protobuf and JSON of the installed package ``tinker``, to records of the log and back.

    ForwardBackwardRequest (protobuf), OptimStepRequest … (JSON) ─▶ operations.py ─▶ log
    log ─▶ ForwardBackwardOutput, SampleResponse (protobuf), … (JSON)

Invariants
- Message types are those of the installed client package; nothing of them is copied here. What the log keeps does not
  depend on them.
- A request is checked whole before its operation is stored: shapes, vocabulary, finite numbers, names of losses.
- A field that cannot be honoured is refused by its name, never ignored.
- What names its model and number is never refused as a request, only as an operation: a client counts on, and a number
  that never comes would stall its model.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator
from itertools import groupby, islice
from typing import Any, Final, Literal, TypeVar

import msgspec
import numpy as np
import pydantic
from google.protobuf.message import DecodeError
from tinker import types
from tinker.proto import tinker_public_pb2 as proto

from actors.protocol.training import AdamStep
from actors.tinker import operations as op
from actors.tinker.datum_checks import DatumReader, checked_tokens
from actors.tinker.errors import OperationRefused, Problem
from actors.tinker.learner import ModelSpec
from actors.tinker.paths import checked_name
from actors.tinker.sampling import SamplingParameters
from configs.limits import Limits

M = TypeVar("M", bound=pydantic.BaseModel)

PROTOBUF: Final = "application/x-protobuf"
_LARGEST_LEARNING_RATE: Final = 1e3
_DATA_FIELD: Final = 3
"""Number of the field ``data`` in ForwardBackwardRequest."""
_SEED_BYTES: Final = 4
_LARGEST_SEQ: Final = (1 << 63) - 1
"""A sampling client that came out of a pickle counts from a random multiple of 10^9, up to 10^18."""
_PARTS_OF_A_DATUM: Final = 16
"""Chunks, inputs and spans of a datum, on average over a request, for which there is room."""
_ERRORS_TOLD: Final = 100


# ------------------------------------------------------------ what is asked, as JSON


class _Chunk(msgspec.Struct):
    tokens: list[int]
    type: Literal["encoded_text"] = "encoded_text"


class _Prompt(msgspec.Struct):
    """Says what may be wrong a million times in a prompt: reading it ends at the first one."""

    chunks: list[_Chunk]


def read_sample(body: bytes, limits: Limits) -> types.SampleRequest:
    """A request for samples, of text alone. Raises OperationRefused."""
    try:
        parts = msgspec.json.decode(body, type=dict[str, msgspec.Raw])
        msgspec.json.decode(parts.pop("prompt", b"{}"), type=_Prompt)
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        raise OperationRefused(f"prompt: {error}: expected chunks of encoded_text, as the client sends them") from error
    if sum(map(len, parts.values())) > limits.tinker_json_bytes:
        raise OperationRefused(f"beside its prompt the request has more than {limits.tinker_json_bytes} bytes")
    return read_json(types.SampleRequest, body)


def read_json(kind: type[M], body: bytes) -> M:
    """A request in JSON. Raises OperationRefused: it is none of this kind; the text names the fields."""
    try:
        return kind.model_validate_json(body or b"{}")
    except pydantic.ValidationError as error:
        raise OperationRefused(_told(error)) from error


def _told(error: pydantic.ValidationError) -> str:
    """What is wrong with a request, by fields, the first five of them."""
    if error.error_count() > _ERRORS_TOLD:  # each of them is a dict of its own
        return f"{error.error_count()} fields are wrong: send what the client's types say"
    parts = [f"{'.'.join(map(str, one['loc'])) or 'the body'}: {one['msg']}" for one in error.errors()[:5]]
    return "; ".join(parts)


def seq_of(value: object, field: str = "seq_id", least: int = 1) -> int:
    """A sequence number. Raises Problem: it is none."""
    if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= _LARGEST_SEQ:
        raise Problem(400, f"{field}: {str(value)[:40]!r} is no sequence number: expected {least}, {least + 1}, …")
    return value


def model_spec(asked: types.CreateModelRequest, model: str) -> ModelSpec:
    """The model that is to be created. Raises OperationRefused."""
    if asked.optimizer_config.type != "adamw":
        raise OperationRefused(f"optimizer_config.type: {asked.optimizer_config.type!r} is not served: choose adamw")
    lora = asked.lora_config
    if lora is None:
        raise OperationRefused("lora_config: it is missing: say a rank (0 trains the whole model)")
    if not 0 <= lora.rank <= 4096:
        raise OperationRefused(f"lora_config.rank: {lora.rank}: expected 1 to 4096, or 0 for the whole model")
    seed = lora.seed if lora.seed is not None else _seed_of(model)
    if not 0 <= seed < 1 << 63:
        raise OperationRefused(f"lora_config.seed: {seed}: expected 0 to 2^63 - 1")
    return ModelSpec(
        base_model=asked.base_model, rank=lora.rank, seed=seed,
        train_mlp=lora.train_mlp, train_attn=lora.train_attn, train_unembed=lora.train_unembed,
    )  # fmt: skip


def optim_step(body: bytes) -> op.OptimStep:
    """Raises OperationRefused."""
    adam = read_json(types.OptimStepRequest, body).optim_params
    if not isinstance(adam, types.AdamParams):
        raise OperationRefused(f"optimizer_params.type: {adam.type!r} is not served: choose AdamParams")
    step = AdamStep(
        learning_rate=adam.learning_rate, beta1=adam.beta1, beta2=adam.beta2, eps=adam.eps,
        weight_decay=adam.weight_decay, max_grad_norm=max(0.0, adam.grad_clip_norm),
    )  # fmt: skip
    ranges: dict[str, tuple[float, float, str]] = {
        "learning_rate": (0.0, _LARGEST_LEARNING_RATE, f"0 to {_LARGEST_LEARNING_RATE:g}"),
        "beta1": (0.0, math.nextafter(1.0, 0.0), "0 to below 1"),
        "beta2": (0.0, math.nextafter(1.0, 0.0), "0 to below 1"),
        "eps": (0.0, 1.0, "0 to 1"),
        "weight_decay": (0.0, 1e6, "0 or more"),
        "max_grad_norm": (0.0, math.inf, "0 (none) or more"),
    }
    for field, (least, most, expected) in ranges.items():
        value = getattr(step, field)
        if not least <= value <= most:
            shown = "grad_clip_norm" if field == "max_grad_norm" else field
            raise OperationRefused(f"adam_params.{shown}: {value:g}: expected {expected}")
    if math.isnan(adam.grad_clip_norm):
        raise OperationRefused("adam_params.grad_clip_norm: nan: expected 0 (none) or more")
    return op.OptimStep(step)


def save_weights(body: bytes, seq: int) -> op.Save:
    """Raises OperationRefused."""
    asked = read_json(types.SaveWeightsRequest, body)
    name = checked_name(asked.path) if asked.path is not None else f"{seq:06d}"
    return op.Save(name, overwrite=asked.overwrite, ttl_s=_ttl(asked.ttl_seconds))


def export(body: bytes, model: str, seq: int) -> op.Export:
    """Raises OperationRefused."""
    asked = read_json(types.SaveWeightsForSamplerRequest, body)
    if asked.path is not None:
        return op.Export(name=checked_name(asked.path), ttl_s=_ttl(asked.ttl_seconds))
    return op.Export(session=f"{model}:snapshot:{seq}", in_flight=asked.kind == "inflight")


def _ttl(ttl_s: int | None) -> int | None:
    if ttl_s is not None and not 0 < ttl_s <= 10 * 366 * 86400:
        raise OperationRefused(f"ttl_seconds: {ttl_s}: expected 1 second to 10 years")
    return ttl_s


# ------------------------------------------------------------ samples


def sample(asked: types.SampleRequest, name: str, vocabulary: int, context_tokens: int, limits: Limits) -> op.Sample:
    """The samples that are asked for. ``name``: of the request, which the seed depends on if it names none.

    Raises:
        OperationRefused: they cannot be drawn.
    """
    for field, wanted in (
        ("prompt_alt_tokens_k", asked.prompt_alt_tokens_k),
        ("target_prompt_logprobs", asked.target_prompt_logprobs),
        ("record_stability_info", asked.record_stability_info),
    ):  # fmt: skip
        if wanted:
            raise OperationRefused(f"{field}: it is not served here: leave it out")
    if not 1 <= asked.num_samples <= limits.tinker_samples:
        raise OperationRefused(f"num_samples: {asked.num_samples}: expected 1 to {limits.tinker_samples}")
    for field in ("topk_prompt_logprobs", "topk_sample_logprobs"):
        if not 0 <= getattr(asked, field) <= limits.tinker_topk:
            raise OperationRefused(f"{field}: {getattr(asked, field)}: expected 0 to {limits.tinker_topk}")
    tokens: list[int] = []
    for chunk in asked.prompt.chunks:
        assert isinstance(chunk, types.EncodedTextChunk), "there are no others in what read_sample reads"
        tokens += chunk.tokens
    try:
        prompt = checked_tokens(np.asarray(tokens, np.int64), "prompt", vocabulary)
    except OverflowError as error:
        raise OperationRefused("prompt: a token has more than 64 bits") from error
    room = context_tokens - len(prompt)
    if not len(prompt) or room < 1:
        raise OperationRefused(
            f"prompt: {len(prompt)} tokens: expected 1 to {context_tokens - 1}, as the context allows"
        )
    last = asked.prompt_logprobs_last_n
    if last is not None and not (asked.prompt_logprobs and 1 <= last < len(prompt)):
        raise OperationRefused(f"prompt_logprobs_last_n: {last}: expected 1 to {len(prompt) - 1}, with prompt_logprobs")
    return op.Sample(
        op.Array.of(prompt), asked.num_samples,
        _sampling(asked.sampling_params, name, room, vocabulary, limits, asked.topk_sample_logprobs),
        prompt_logprobs=bool(asked.prompt_logprobs), last_prompt_logprobs=last, topk=asked.topk_prompt_logprobs,
    )  # fmt: skip


def _sampling(asked: Any, name: str, room: int, vocabulary: int, limits: Limits, topk: int) -> SamplingParameters:
    wanted = room if asked.max_tokens is None else asked.max_tokens
    if wanted < 1:
        raise OperationRefused(f"sampling_params.max_tokens: {wanted}: expected 1 or more")
    if not 0.0 <= asked.temperature <= 100.0:
        raise OperationRefused(f"sampling_params.temperature: {asked.temperature}: expected 0 to 100")
    if not 0.0 < asked.top_p <= 1.0:
        raise OperationRefused(f"sampling_params.top_p: {asked.top_p}: expected above 0, to 1")
    if asked.top_k != -1 and not 1 <= asked.top_k <= vocabulary:
        raise OperationRefused(f"sampling_params.top_k: {asked.top_k}: expected -1 (all), or 1 to {vocabulary}")
    if asked.seed is not None and not -(1 << 63) <= asked.seed < 1 << 63:
        raise OperationRefused(f"sampling_params.seed: {asked.seed}: expected a number of 64 bits")
    stops = [asked.stop] if isinstance(asked.stop, str) else list(asked.stop or ())
    texts = tuple(one for one in stops if isinstance(one, str))
    tokens = tuple(one for one in stops if isinstance(one, int))
    if len(stops) > limits.tinker_stops or not all(texts) or any(not 0 <= one < vocabulary for one in tokens):
        what = f"at most {limits.tinker_stops} texts that are not empty, or ids below {vocabulary}"
        raise OperationRefused(f"sampling_params.stop: expected {what}")
    return SamplingParameters(
        max_tokens=min(wanted, room), seed=_seed_of(name) if asked.seed is None else asked.seed,
        temperature=asked.temperature, top_k=asked.top_k, top_p=asked.top_p,
        stop_texts=texts, stop_tokens=tokens, stops_at_eos=asked.stop is None, topk=topk,
    )  # fmt: skip


# ------------------------------------------------------------ what is asked, as protobuf


def read_forward_backward(body: bytes, limits: Limits) -> proto.ForwardBackwardRequest:
    """Raises Problem: it is no ForwardBackwardRequest, or has too many datums to be read."""
    data, parts = _counted(body, limits.tinker_datums)
    if data > limits.tinker_datums or parts > _PARTS_OF_A_DATUM * limits.tinker_datums:
        text = f"more than {limits.tinker_datums} datums, or {_PARTS_OF_A_DATUM} times as many parts of them"
        raise Problem(413, f"data: {text}, in one request: send them in several")
    message = proto.ForwardBackwardRequest()
    try:
        message.ParseFromString(body)
    except DecodeError as error:
        text = "the body is no ForwardBackwardRequest in protobuf: use a client of tinker 0.25 to 0.38"
        raise Problem(400, text) from error
    if not message.model_id:
        raise Problem(400, "model_id: it is missing: the body is no ForwardBackwardRequest, or an empty one")
    return message


def _counted(body: bytes, most: int) -> tuple[int, int]:
    """The numbers of datums, and of fields of them and beside them, in a message that is not parsed yet.

    What is parsed takes fifty times the bytes of an empty field on the wire. Beyond ``most`` they are not counted on.
    """
    data = parts = 0
    for field, at, end in _fields(body, 0, len(body)):
        parts += 1
        if field == _DATA_FIELD:
            data += 1
            parts += sum(1 for _ in islice(_fields(body, at, end), _PARTS_OF_A_DATUM * most))
        if data > most or parts > _PARTS_OF_A_DATUM * most:
            break
    return data, parts


def _fields(body: bytes, at: int, end: int) -> Iterator[tuple[int, int, int]]:
    """Number, beginning and end of each field of a message; what is no field ends it, and the parser says why."""
    while at < end:
        tag, at = _varint(body, at)
        size, kind = 0, tag & 7
        if kind == 0:
            size = _varint(body, at)[1] - at
        elif kind == 2:
            size, at = _varint(body, at)
        elif kind in (1, 5):
            size = 8 if kind == 1 else 4
        else:
            return
        yield tag >> 3, at, min(at + size, end)
        at += size


def _varint(body: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while at < len(body) and shift < 64:
        byte = body[at]
        value |= (byte & 0x7F) << shift
        at, shift = at + 1, shift + 7
        if byte < 0x80:
            break
    return value, at


def forward_backward(
    message: proto.ForwardBackwardRequest, vocabulary: int, context_tokens: int, limits: Limits
) -> op.ForwardBackward:
    """The operation that a message asks for. Raises OperationRefused."""
    reader = DatumReader(message.loss_fn, vocabulary, context_tokens, limits)
    if not message.data:
        raise OperationRefused("data: it is empty: send one datum or more")
    parameters = _parameters(message)
    reader.check_parameters(parameters)
    datums = [op.DatumRecord.of(reader.read(datum, place)) for place, datum in enumerate(message.data)]
    return op.ForwardBackward(datums, message.loss_fn, parameters, message.forward_only)


def _parameters(message: proto.ForwardBackwardRequest) -> dict[str, float]:
    """The loss's parameters, of the newer map if it is there."""
    if not message.loss_fn_config_v2:
        return dict(message.loss_fn_config)
    for name, value in message.loss_fn_config_v2.items():
        if value.WhichOneof("value") != "number":
            raise OperationRefused(f"loss_fn_config.{name}: {value.text[:100]!r}: expected a number")
    return {name: value.number for name, value in message.loss_fn_config_v2.items()}


# ------------------------------------------------------------ what is answered


def losses(answer: op.Losses) -> bytes:
    """ForwardBackwardOutput: one record for each run of datums with as many targets at a position."""
    message = proto.ForwardBackwardOutput(loss_fn_output_type="ArrayRecord", metrics=answer.metrics)
    for trailing, run in groupby(answer.logprobs, lambda one: one.shape[1:]):
        arrays = list(run)
        record = message.loss_fn_outputs.add(num_datums=len(arrays))
        tensor = record.fields["logprobs"]
        tensor.data = b"".join(one.data for one in arrays)
        tensor.offsets = np.cumsum([0, *(len(one.data) for one in arrays)], dtype=np.int64).tobytes()
        tensor.dtype = proto.DTYPE_FLOAT32
        tensor.trailing_shape.extend(trailing)
    return message.SerializeToString()


def samples(answer: op.Samples) -> bytes:
    """SampleResponse."""
    message = proto.SampleResponse()
    for one in answer.sequences:
        reason = proto.STOP_REASON_STOP if one.stopped else proto.STOP_REASON_LENGTH
        sequence = message.sequences.add(stop_reason=reason, tokens=one.tokens.data, logprobs=one.logprobs.data)
        if one.top_tokens is not None and one.top_logprobs is not None:
            _fill(sequence.topk_sampled_logprobs, one.top_tokens, one.top_logprobs)
    if answer.prompt_logprobs is not None:
        message.prompt_logprobs = answer.prompt_logprobs.data
    if answer.top_tokens is not None and answer.top_logprobs is not None:
        _fill(message.topk_prompt_logprobs, answer.top_tokens, answer.top_logprobs)
    return message.SerializeToString()


def _fill(top: proto.TopkLogprobs, tokens: op.Array, logprobs: op.Array) -> None:
    top.token_ids, top.logprobs = tokens.data, logprobs.data
    top.length, top.k = tokens.shape


def _seed_of(*names: object) -> int:
    """A seed of 32 bits that depends on ``names`` alone, for requests that name none."""
    digest = hashlib.blake2b("\0".join(map(str, names)).encode(), digest_size=_SEED_BYTES).digest()
    return int.from_bytes(digest, "little")
