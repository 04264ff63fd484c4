"""Datums of a client, checked against their loss, the vocabulary and the context before anything computes on them.

model_input        tokens int32[n]
target_tokens      int32[n], for cross_entropy also int32[n, K]; position i is what should follow token i
all other inputs   float32, in the shape of target_tokens
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

import numpy as np
from tinker.proto import tinker_public_pb2 as proto

from actors.protocol.datums import Datum
from actors.tinker.errors import OperationRefused
from configs.limits import Limits


@dataclass(frozen=True)
class _Loss:
    """Says what a loss takes."""

    needs: frozenset[str] = frozenset()
    may_have: frozenset[str] = frozenset()
    parameters: frozenset[str] = frozenset()


_OF_RATIOS: Final = frozenset({"logprobs", "advantages"})
_CLIPS: Final = frozenset({"clip_low_threshold", "clip_high_threshold"})
LOSSES: Final = {
    "cross_entropy": _Loss(may_have=frozenset({"weights"})),
    "importance_sampling": _Loss(_OF_RATIOS),
    "ppo": _Loss(_OF_RATIOS, parameters=_CLIPS),
    "cispo": _Loss(_OF_RATIOS, parameters=_CLIPS),
    "dro": _Loss(_OF_RATIOS, parameters=frozenset({"beta"})),
    "gspo": _Loss(_OF_RATIOS, may_have=frozenset({"sequence_ratio_mask"}), parameters=_CLIPS),
}
"""Losses, with what each needs beside ``target_tokens``, may have, and takes as parameters."""
_INSTEAD: Final = {
    "stable_reinforce": "its formula is not published: choose loss_fn=importance_sampling, ppo or cispo",
    "custom": "custom losses run in your client here: call forward_backward_custom with a Python function",
}
_DTYPES: Final = {
    proto.DTYPE_FLOAT32: np.dtype("<f4"),
    proto.DTYPE_INT64: np.dtype("<i8"),
    proto.DTYPE_INT32: np.dtype("<i4"),
}
_INDEX: Final = np.dtype("<i8")


class DatumReader:
    """Reads the datums of one request."""

    def __init__(self, loss: str, vocabulary: int, context_tokens: int, limits: Limits) -> None:
        """Raises OperationRefused: there is no such loss."""
        found = LOSSES.get(loss)
        if found is None:
            instead = _INSTEAD.get(loss, f"choose one of {', '.join(LOSSES)}")
            raise OperationRefused(f"loss_fn: {loss[:100]!r} is not served: {instead}")
        self._name, self._loss = loss, found
        self._vocabulary, self._context_tokens = vocabulary, context_tokens
        self._cells_left = limits.tinker_cells

    def check_parameters(self, parameters: dict[str, float]) -> None:
        """Raises OperationRefused: the loss takes no such parameter, or one is no number."""
        for name, value in parameters.items():
            if name not in self._loss.parameters:
                known = ", ".join(sorted(self._loss.parameters)) or "none"
                raise OperationRefused(f"loss_fn_config.{name[:100]}: {self._name} takes no such parameter ({known})")
            if not math.isfinite(value) or value < 0:
                raise OperationRefused(f"loss_fn_config.{name}: {value}: expected a finite number, 0 or more")

    def read(self, message: proto.Datum, place: int) -> Datum:
        """The datum at ``place`` of the request. Raises OperationRefused."""
        at = f"data[{place}]"
        tokens = self._tokens(message, at)
        inputs = message.loss_fn_inputs
        if "target_tokens" not in inputs:
            raise OperationRefused(f"{at}.loss_fn_inputs.target_tokens: it is missing")
        targets = self._array(inputs["target_tokens"], f"{at}.loss_fn_inputs.target_tokens")
        if targets.dtype.kind != "i":
            raise OperationRefused(f"{at}.loss_fn_inputs.target_tokens: expected integers, found {targets.dtype}")
        shaped = targets.ndim == 1 or (targets.ndim == 2 and targets.shape[1] > 0 and self._name == "cross_entropy")
        if not shaped or len(targets) != len(tokens):
            also = " or [n, K]" if self._name == "cross_entropy" else ""
            expected = f"[n]{also} with n = {len(tokens)}, as many as there are tokens"
            raise OperationRefused(
                f"{at}.loss_fn_inputs.target_tokens: shape {list(targets.shape)}: expected {expected}"
            )
        targets = self._of_vocabulary(targets, f"{at}.loss_fn_inputs.target_tokens")
        columns = self._columns(inputs, at, targets.shape)
        return Datum(tokens, targets, columns)

    def _columns(
        self, inputs: dict[str, proto.Tensor] | object, at: str, shape: tuple[int, ...]
    ) -> dict[str, np.ndarray]:
        assert hasattr(inputs, "items")
        columns: dict[str, np.ndarray] = {}
        for name, tensor in sorted(inputs.items()):  # pyright: ignore[reportAttributeAccessIssue]
            if name == "target_tokens":
                continue
            if name not in self._loss.needs | self._loss.may_have:
                known = ", ".join(sorted(self._loss.needs | self._loss.may_have))
                raise OperationRefused(f"{at}.loss_fn_inputs.{name[:100]}: {self._name} takes no such input ({known})")
            column = self._array(tensor, f"{at}.loss_fn_inputs.{name}").astype(np.float32)
            if column.shape != shape:
                text = f"shape {list(column.shape)}: expected {list(shape)}, that of target_tokens"
                raise OperationRefused(f"{at}.loss_fn_inputs.{name}: {text}")
            if not np.isfinite(column).all():
                raise OperationRefused(f"{at}.loss_fn_inputs.{name}: it has values that are not finite")
            columns[name] = column
        if missing := sorted(self._loss.needs - set(columns)):
            raise OperationRefused(f"{at}.loss_fn_inputs.{missing[0]}: {self._name} needs it, and it is missing")
        if self._name == "cross_entropy" and "weights" not in columns:
            columns["weights"] = np.ones(shape, np.float32)
        return columns

    def _tokens(self, message: proto.Datum, at: str) -> np.ndarray:
        parts: list[np.ndarray] = []
        for chunk in message.model_input:
            kind = chunk.WhichOneof("chunk")
            if kind != "encoded_text":
                raise OperationRefused(f"{at}.model_input: {kind or 'empty'} chunks are not served: send encoded_text")
            parts.append(_numbers(chunk.encoded_text.tokens, np.dtype("<i4"), f"{at}.model_input"))
        tokens = np.concatenate(parts) if parts else np.empty(0, np.int32)
        if not 1 <= len(tokens) <= self._context_tokens:
            expected = f"1 to {self._context_tokens}, the model's context"
            raise OperationRefused(f"{at}.model_input: {len(tokens)} tokens: expected {expected}")
        return self._of_vocabulary(tokens, f"{at}.model_input")

    def _of_vocabulary(self, found: np.ndarray, field: str) -> np.ndarray:
        return checked_tokens(found, field, self._vocabulary)

    def _array(self, tensor: proto.Tensor, field: str) -> np.ndarray:
        """A tensor, laid out. Raises OperationRefused."""
        dtype = _DTYPES.get(tensor.dtype)
        if dtype is None:
            raise OperationRefused(f"{field}: dtype {tensor.dtype} is not served: send float32 or int64")
        shape = tuple(tensor.shape[:3])
        sparse = tensor.HasField("sparse_csr")
        values = _numbers(tensor.sparse_csr.values if sparse else tensor.dense, dtype, field)
        shape = shape or (len(values),)
        if any(size < 0 for size in shape) or len(shape) > 2:
            raise OperationRefused(f"{field}: shape {list(shape)}: expected one or two sizes, 0 or more")
        self._cells_left -= math.prod(shape)
        if self._cells_left < 0:
            raise OperationRefused(f"{field}: the request has too many numbers, laid out: send it in parts")
        if sparse:
            return _laid_out(tensor.sparse_csr, values, shape, field)
        if len(values) != math.prod(shape):
            raise OperationRefused(f"{field}: {len(values)} numbers do not fill the shape {list(shape)}")
        return values.reshape(shape)


def checked_tokens(found: np.ndarray, field: str, vocabulary: int) -> np.ndarray:
    """int32, of the shape of ``found``. Raises OperationRefused: one is not of the vocabulary."""
    if found.size and (int(found.min()) < 0 or int(found.max()) >= vocabulary):
        wrong = int(found[(found < 0) | (found >= vocabulary)].flat[0])
        raise OperationRefused(f"{field}: token {wrong} is not of the vocabulary: expected 0 to {vocabulary - 1}")
    return found.astype(np.int32)


def _numbers(data: bytes, dtype: np.dtype, field: str) -> np.ndarray:
    if len(data) % dtype.itemsize:
        raise OperationRefused(f"{field}: {len(data)} bytes are no whole number of {dtype.name}")
    return np.frombuffer(data, dtype)


def _laid_out(sparse: proto.SparseCsr, values: np.ndarray, shape: tuple[int, ...], field: str) -> np.ndarray:
    """A sparse matrix (compressed rows) with 0 where it has no value."""
    starts, columns = _numbers(sparse.crow_indices, _INDEX, field), _numbers(sparse.col_indices, _INDEX, field)
    sound = (
        len(shape) == 2
        and len(starts) == shape[0] + 1
        and starts[0] == 0
        and starts[-1] == len(values) == len(columns)
        and not np.any(np.diff(starts) < 0)
        and not np.any((columns < 0) | (columns >= shape[1]))
    )
    if not sound:
        raise OperationRefused(f"{field}: its rows and columns are no sparse matrix of shape {list(shape)}")
    dense = np.zeros(shape, values.dtype)
    dense[np.repeat(np.arange(shape[0]), np.diff(starts)), columns] = values
    return dense
