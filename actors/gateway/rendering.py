r"""Messages to tokens: a whole chat by the chat template, or only the new messages behind the model's last turn.

    render   template(messages, generation prompt) ─▶ text ─▶ ids               where a context begins
    bridge   template(… assistant: SENTINEL, new messages, generation prompt)   behind a turn
             ……………………………… SENTINEL ┊ <|im_end|>\n<|im_start|>user\n…assistant\n ─▶ ids, less the end token that
             the same without the new messages must write the same up to here       the model has said itself

Invariants
- What was sampled is never rendered again: a BPE tokenizer may turn its text into other tokens than the model drew.
- A bridge is made only where the template keeps what stands before it. If it rewrites history (drops old thinking at a
  new question, moves the tools), there is none, and a fresh context begins with the whole rendering.
- A turn that ended without an end token (its length, a stop text) is closed as the template closes turns.
- Both are functions of the messages: asked again, they give the same tokens. ``walk.py`` relies on this.
- A text is tokenized only if it may fit the context: no token has more characters than the longest of the vocabulary.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Final, cast

import xxhash

from actors.gateway.bounded_cache import BoundedCache
from actors.gateway.errors import too_long, wrong
from actors.gateway.tool_calls import CLOSE_CALL, OPEN_CALL

Message = dict[str, Any]
_SENTINEL: Final = "xHRx0turn0xRHx"
_THOUGHT: Final = "xHRx0thought{}0xRHx"
_EMPTY_THINKING: Final = re.compile(r"<think>\s*</think>\s*")
_REFUSAL_CHARACTERS: Final = 300


def _digest(before: bytes, value: object) -> bytes:
    return xxhash.xxh3_128_digest(before + json.dumps(value, sort_keys=True, default=str).encode())


@dataclass(frozen=True)
class Chat:
    """Holds the conversation of a request, in the form that templates take."""

    messages: tuple[Message, ...]
    tools: tuple[dict[str, Any], ...] = ()
    arguments: tuple[tuple[str, Any], ...] = ()
    """Further arguments of the template."""

    @cached_property
    def said(self) -> list[int]:
        """Indices of the assistant's messages."""
        return [i for i, message in enumerate(self.messages) if message["role"] == "assistant"]

    def digest(self, count: int, *further: object) -> bytes:
        """Key that tells the first ``count`` messages, and how they are rendered, apart from all others."""
        return self._digests[count] + repr(further).encode()

    @cached_property
    def _digests(self) -> list[bytes]:
        """Digest of the first n messages, for each n from 0 on."""
        found = [_digest(b"", [self.tools, self.arguments])]
        for message in self.messages:
            found.append(_digest(found[-1], message))
        return found


class ChatTemplate:
    """Renders chats for one model. ``defaults``: arguments that the job gives the template; ``kept``: renderings that
    are remembered, of ``most`` tokens together; ``positions``: most tokens of a context.
    """

    def __init__(self, tokenizer: Any, defaults: dict[str, Any], kept: int, most: int, positions: int) -> None:
        self._tokenizer = tokenizer
        self._defaults = defaults
        self._positions = positions
        self._most_characters = positions * max(map(len, tokenizer.get_vocab()), default=1)
        self._known = BoundedCache[list[int] | None](kept, most, lambda ids: len(ids or ()))

    @property
    def is_there(self) -> bool:
        return bool(self._tokenizer.chat_template)

    def refuse_too_long(self, chat: Chat) -> None:
        """Raise HttpProblem for messages that cannot fit the context; it takes no time to see that."""
        if len(chat.messages) > self._positions:
            raise too_long("messages", f"{len(chat.messages)} messages", self._positions)
        self._refuse_characters(sum(len(message["content"]) for message in chat.messages), "messages")

    def _refuse_characters(self, characters: int, param: str) -> None:
        if characters > self._most_characters:
            raise too_long(param, f"{characters} characters", self._positions)

    def encode(self, text: str, *, special_tokens: bool = False, param: str = "messages") -> list[int]:
        """Ids of ``text``. Raises HttpProblem if it cannot fit the context; ``param`` is where it came from."""
        self._refuse_characters(len(text), param)
        return cast("list[int]", self._tokenizer(text, add_special_tokens=special_tokens, verbose=False)["input_ids"])

    def render(self, chat: Chat, count: int | None = None, *, ask: bool = True) -> list[int]:
        """Ids of the first ``count`` messages (default all) with the generation prompt, unless the model is not asked.

        Raises:
            HttpProblem: the template refuses the messages; the text has its words.
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
        """Ids of ``tail`` as they are behind a text: some tokenizers put a space before the first word."""
        head = self.encode(_SENTINEL)
        whole = self.encode(_SENTINEL + tail)
        return whole[len(head) :] if whole[: len(head)] == head else self.encode(tail)

    def _text(self, chat: Chat, messages: Sequence[Message], *, ask: bool = True) -> str:
        how = {**self._defaults, **dict(chat.arguments), "add_generation_prompt": ask, "tokenize": False}
        if chat.tools:
            how["tools"] = list(chat.tools)
        try:
            return cast("str", self._tokenizer.apply_chat_template(list(map(_as_written, messages)), **how))
        except Exception as error:  # a template is a program, and may refuse messages by any exception
            said = f"{type(error).__name__}: {error}"[:_REFUSAL_CHARACTERS]
            raise wrong("messages", f"the model's chat template refuses them ({said})") from error


def _as_written(message: Message) -> Message:
    """``message`` with calls that could not be read as the text that they were: templates want objects as arguments."""
    calls = message.get("tool_calls") or ()
    if all(isinstance(call["function"]["arguments"], dict) for call in calls):
        return message
    texts = [message.get("content") or ""]
    for call in calls:
        made = call["function"]
        said = made["arguments"] if isinstance(made["arguments"], str) else json.dumps(made, ensure_ascii=False)
        texts.append(f"{OPEN_CALL}\n{said}\n{CLOSE_CALL}")
    return {key: value for key, value in message.items() if key != "tool_calls"} | {"content": "\n".join(texts).strip()}


def _thinks_apart(message: Message, thought: str) -> Message:
    return message | dict.fromkeys(("reasoning_content", "reasoning", "thinking"), thought)


def _thinks_inline(message: Message, thought: str) -> Message:
    plain = {key: value for key, value in message.items() if key not in ("reasoning_content", "reasoning", "thinking")}
    return plain | {"content": f"<think>\n{thought}\n</think>\n\n{message.get('content') or ''}"}


def _without_empty_thinking(text: str) -> str:
    """``text`` without empty thinking blocks, which a template writes at some places and leaves out at others."""
    return _EMPTY_THINKING.sub("", text)
