"""A small valid value of any type that travels, for mutation to begin with."""

from __future__ import annotations

import dataclasses
import enum
import types
import typing
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

_PLAIN: dict[Any, Any] = {
    int: 1, float: 0.5, str: "a", bytes: b"b", bool: True, None: None, type(None): None, Any: 1, object: 1,
    np.ndarray: np.arange(3, dtype=np.int32), Path: "a",
}  # fmt: skip


def example(kind: Any) -> Any:
    """One value of ``kind``: structs with all their fields, containers with one element."""
    origin, args = typing.get_origin(kind), typing.get_args(kind)
    if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
        return kind(**{field.name: example(field.type) for field in msgspec.structs.fields(kind)})
    if dataclasses.is_dataclass(kind) and isinstance(kind, type):
        hints = typing.get_type_hints(kind)
        return kind(**{field.name: example(hints[field.name]) for field in dataclasses.fields(kind)})
    if isinstance(kind, type) and issubclass(kind, enum.Enum):
        return next(iter(kind))
    if origin is typing.Annotated:
        return _bounded(args[0], next(meta for meta in args[1:] if isinstance(meta, msgspec.Meta)))
    if origin is typing.Literal:
        return args[0]
    if origin in (types.UnionType, typing.Union):
        return example(args[0])
    if origin is tuple:
        return tuple(example(arg) for arg in args if arg is not ...)
    if origin in (dict, Mapping) or (isinstance(origin, type) and issubclass(origin, Mapping)):
        return {example(args[0]): example(args[1])}
    if origin is not None and origin is not np.ndarray:
        items = [example(args[0])]
        return frozenset(items) if origin is frozenset else items
    if origin is np.ndarray:
        return _PLAIN[np.ndarray]
    if kind in (list, dict, tuple, Sequence, Mapping):
        return {} if kind in (dict, Mapping) else []
    return _PLAIN[kind]


def _bounded(kind: Any, meta: msgspec.Meta) -> Any:
    """The shortest list, the least number."""
    if typing.get_origin(kind) is list:
        return example(kind) * (meta.min_length or 1)
    return max(1, int(meta.ge or 0)) if kind is int else example(kind)
