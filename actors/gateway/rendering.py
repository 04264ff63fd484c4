r"""Messages to tokens: whole by the chat template, or only what is new behind what the model has said.

    render   template(messages, generation prompt) ─▶ text ─▶ ids               where a context begins
    bridge   template(… assistant: SENTINEL, new messages, generation prompt)   behind a turn
             ……………………………… SENTINEL ┊ <|im_end|>\n<|im_start|>user\n…assistant\n ─▶ ids, less the end token that
             the same without the new messages must write the same up to here       the model has said itself

Invariants
- What was sampled is never rendered again: with a BPE its text is other tokens than those that the model drew.
- A bridge is made only where the template keeps what stands before it. If it rewrites history (drops old thinking at a
  new question, moves the tools), there is none, and a fresh context begins with the whole rendering.
- A turn that ended without an end token (its length, a stop text) is closed as the template closes turns.
- Both are functions of the messages: asked again, they give the same tokens. ``walk.py`` stands on it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Final, cast

import xxhash

from actors.gateway.errors import wrong
from actors.gateway.remembered import Remembered

Message = dict[str, Any]
_SENTINEL: Final = "xHRx0turn0xRHx"
_THOUGHT: Final = "xHRx0thought{}0xRHx"
_EMPTY_THINKING: Final = re.compile(r"<think>\s*</think>\s*")
_REFUSAL_CHARACTERS: Final = 300


def _digest(before: bytes, value: object) -> bytes:
    return xxhash.xxh3_128_digest(before + json.dumps(value, sort_keys=True, default=str).encode())


@dataclass(frozen=True)
class Chat:
    """It is a conversation as a request has it, in the form that templates take."""

    messages: tuple[Message, ...]
    tools: tuple[dict[str, Any], ...] = ()
    arguments: tuple[tuple[str, Any], ...] = ()
    """Further arguments of the template."""

    @cached_property
    def said(self) -> list[int]:
        """Places of the assistant's messages."""
        return [i for i, message in enumerate(self.messages) if message["role"] == "assistant"]

    def digest(self, count: int, *further: object) -> bytes:
        """It tells the first ``count`` messages, and how they are rendered, apart from all others."""
        return self._digests[count] + repr(further).encode()

    @cached_property
    def _digests(self) -> list[bytes]:
        """Each is that of so many messages, from none on."""
        found = [_digest(b"", [self.tools, self.arguments])]
        for message in self.messages:
            found.append(_digest(found[-1], message))
        return found


class ChatTemplate:
    """Renders chats for one model. ``defaults``: arguments that the job gives the template; ``kept``: renderings that
    are remembered, of ``most`` tokens together.
    """

    def __init__(self, tokenizer: Any, defaults: dict[str, Any], kept: int, most: int) -> None:
        self._tokenizer = tokenizer
        self._defaults = defaults
        self._known = Remembered[list[int] | None](kept, most, lambda ids: len(ids or ()))

    @property
    def is_there(self) -> bool:
        return bool(self._tokenizer.chat_template)

    def encode(self, text: str, *, special_tokens: bool = False) -> list[int]:
        return cast("list[int]", self._tokenizer(text, add_special_tokens=special_tokens, verbose=False)["input_ids"])

    def render(self, chat: Chat, count: int | None = None, *, ask: bool = True) -> list[int]:
        """Ids of the first ``count`` messages (default all) with the generation prompt, unless the model is not asked.

        Raises:
            HttpProblem: the template refuses them; its own words.
        """
        count = len(chat.messages) if count is None else count
        messages = chat.messages[:count]
        return self._known.get(chat.digest(count, ask), lambda: self.encode(self._text(chat, messages, ask=ask))) or []

    def bridge(self, chat: Chat, last: int, until: int, said: int, reasoned: Collection[int]) -> list[int] | None:
        """Ids of ``messages[last + 1 : until]`` and the generation prompt, behind a turn; None: there is no bridge.

        ``last``: place of the turn's message; ``said``: the last token of the turn; ``reasoned``: places of the turns
        of this context in which the model has reasoned.
        """
        key = chat.digest(until, "bridge", last, said, sorted(reasoned))
        return self._known.get(key, lambda: self._bridge(chat, last, until, said, reasoned))

    def _bridge(self, chat: Chat, last: int, until: int, said: int, reasoned: Collection[int]) -> list[int] | None:
        for mark in (_thinks_apart, _thinks_inline):
            turn: Message = {"role": "assistant", "content": _SENTINEL}
            past = [*chat.messages[:last], turn]
            for place in reasoned:
                past[place] = mark(past[place], _THOUGHT.format(place))
            try:
                alone = self._text(chat, past, ask=False)
                whole = self._text(chat, [*past, *chat.messages[last + 1 : until]])
            except Exception:  # noqa: BLE001 (a template may refuse the sentinel's message in any way)
                return None
            kept, _, tail = whole.partition(_SENTINEL)
            if (alone.count(_SENTINEL), whole.count(_SENTINEL)) != (1, 1):
                return None
            if not all(_THOUGHT.format(place) in alone for place in reasoned):
                continue
            if _without_empty_thinking(kept) != _without_empty_thinking(alone.partition(_SENTINEL)[0]):
                return None
            ids = self._encode_behind(tail)
            return ids[1:] if ids and ids[0] == said else ids
        return None

    def _encode_behind(self, tail: str) -> list[int]:
        """Ids of ``tail`` as they are behind a text: some tokenizers put a space before what comes first."""
        head = self.encode(_SENTINEL)
        whole = self.encode(_SENTINEL + tail)
        return whole[len(head) :] if whole[: len(head)] == head else self.encode(tail)

    def _text(self, chat: Chat, messages: Sequence[Message], *, ask: bool = True) -> str:
        how = {**self._defaults, **dict(chat.arguments), "add_generation_prompt": ask, "tokenize": False}
        if chat.tools:
            how["tools"] = list(chat.tools)
        try:
            return cast("str", self._tokenizer.apply_chat_template(list(messages), **how))
        except Exception as error:  # a template is a program, and what it raises is its verdict on the messages
            said = f"{type(error).__name__}: {error}"[:_REFUSAL_CHARACTERS]
            raise wrong("messages", f"the model's chat template refuses them ({said})") from error


def _thinks_apart(message: Message, thought: str) -> Message:
    return message | dict.fromkeys(("reasoning_content", "reasoning", "thinking"), thought)


def _thinks_inline(message: Message, thought: str) -> Message:
    plain = {key: value for key, value in message.items() if key not in ("reasoning_content", "reasoning", "thinking")}
    return plain | {"content": f"<think>\n{thought}\n</think>\n\n{message.get('content') or ''}"}


def _without_empty_thinking(text: str) -> str:
    """A block that holds nothing comes and goes with the template's mood: it is no part of what was thought."""
    return _EMPTY_THINKING.sub("", text)
