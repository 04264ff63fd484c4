"""Messages: typed, immutable, registered by tag.

A message is a frozen struct with a tag that names its owner and purpose. The tag travels in the envelope, so a
message with an unknown tag is refused before its body is decoded.

    @message("scheduler.grant_credit")
    class GrantCredit(Message):
        job: str
        slots: int

Array fields are annotated ``np.ndarray`` and travel as raw frames (``transport/codec.py``).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar, dataclass_transform

import msgspec


@dataclass_transform(frozen_default=True, field_specifiers=(msgspec.field,))
class Message(msgspec.Struct, frozen=True, kw_only=True):
    """Is the base class of all messages between actors."""


M = TypeVar("M", bound=type[Message])

_by_tag: dict[str, type[Message]] = {}
_tags: dict[type[Message], str] = {}


def message(tag: str) -> Callable[[M], M]:
    """Register a message class under ``tag`` (``role.purpose``); tags are unique in the system."""

    def register(kind: M) -> M:
        if tag in _by_tag and _by_tag[tag].__qualname__ != kind.__qualname__:
            raise ValueError(f"message tag {tag!r} is taken by {_by_tag[tag].__qualname__}")
        _by_tag[tag] = kind
        _tags[kind] = tag
        return kind

    return register


@message("core.done")
class Done(Message):
    """Answers an ask whose handler returned None."""


def tag_of(kind: type[Message]) -> str:
    return _tags[kind]


def class_of(tag: str) -> type[Message] | None:
    """The message class registered under ``tag``, or None for a tag this process does not know."""
    return _by_tag.get(tag)
