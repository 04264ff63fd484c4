"""A turn as an agent reads it: the model's tokens become reasoning, content and tool calls.

    ids ── without end tokens ──▶ text ── cut at a stop string ──▶ <think>…</think> │ content │ <tool_call>…</tool_call>

Invariants
- Reading is a function of the tokens and of what was asked, so a turn that is read again gives the same reply, tool
  calls included: their ids come from the turn's number.
- No text is lost, or made up. A call that cannot be read is a call with what the model wrote (``tool_calls.py``).
- Reasoning is split off only where the chat template knows it. A call that is made before it has ended, ends it.

The ``response_template`` of the tokenizer, if it has one, reads a turn whole. Otherwise, and where a turn does not fit
it, tool calls are read in the forms of ``tool_calls.py``.
"""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, cast

import numpy as np

from actors.gateway.bounded_cache import BoundedCache
from actors.gateway.rendering import Chat
from actors.gateway.tool_calls import (
    CLOSE_CALL,
    OPEN_CALL,
    ToolCall,
    arguments_object,
    split_calls,
    unreadable_call,
    written,
)

Tokens = Sequence[int] | np.ndarray
_OPEN, _CLOSE = "<think>", "</think>"
_MARKERS: Final = (_OPEN, _CLOSE, OPEN_CALL, CLOSE_CALL)
_PROMPT_END_TOKENS: Final = 16
"""Number of last tokens of a prompt that show whether it opens the reasoning."""


@dataclass(frozen=True, slots=True)
class Reply:
    """Holds one turn as its agent reads it."""

    content: str
    reasoning: str | None = None
    calls: tuple[ToolCall, ...] = ()

    @property
    def characters(self) -> int:
        return len(self.content) + len(self.reasoning or "") + sum(len(call.arguments) for call in self.calls)

    def is_said_by(self, message: dict[str, Any]) -> bool:
        """Whether an assistant's message of a request is this turn, even if trimmed or without its reasoning."""
        content = message.get("content") or ""
        told = message.get("reasoning_content") or message.get("reasoning") or ""
        if not isinstance(content, str) or content.strip() != self.content.strip():
            return False
        if told and told.strip() != (self.reasoning or "").strip():
            return False
        calls = [call.get("function", call) for call in message.get("tool_calls") or []]
        return [(c.get("name"), _plain(c.get("arguments"))) for c in calls] == [
            (c.name, _plain(c.arguments)) for c in self.calls
        ]


def _plain(arguments: object) -> object:
    found = arguments_object(arguments)
    return arguments if found is None else found


class ReplyReader:
    """Reads turns for one tokenizer and its chat template. ``kept`` replies are remembered, of at most ``most``
    characters together.
    """

    def __init__(self, tokenizer: Any, ends: Sequence[int], kept: int, most: int) -> None:
        self._known = BoundedCache[Reply](kept, most, lambda reply: reply.characters)
        self._tokenizer = tokenizer
        self.ends = frozenset(ends)
        """Tokens that end a turn."""
        specials = {int(i) for i in tokenizer.all_special_ids}
        shown = {tokenizer.convert_tokens_to_ids(marker) for marker in _MARKERS}
        self._hidden = (specials - shown) | self.ends
        self._largest_id = max(tokenizer.get_vocab().values(), default=-1)
        template = tokenizer.chat_template
        self._thinks = _CLOSE in str(template) or "reasoning_content" in str(template)
        self._own = getattr(tokenizer, "response_template", None) is not None
        self.reads_calls = self._own or OPEN_CALL in str(template)
        """Whether the model writes calls of tools in a form that is read here, as far as its template says."""
        self._texts: dict[int, str] = {}

    def text(self, tokens: Tokens) -> str:
        """The text of ``tokens`` without end tokens and without special tokens."""
        shown = [t for t in map(int, tokens) if t not in self._hidden and t <= self._largest_id]
        return cast("str", self._tokenizer.decode(shown, skip_special_tokens=False))

    def token_text(self, token: int) -> str:
        if token not in self._texts:  # as many entries as the vocabulary has, at most
            known = token <= self._largest_id
            self._texts[token] = self._tokenizer.decode([token], skip_special_tokens=False) if known else ""
        return self._texts[token]

    def opens_reasoning(self, prompt: Tokens) -> bool:
        """Whether the prompt has begun the reasoning already."""
        if not self._thinks:
            return False
        last = [t for t in map(int, prompt[-_PROMPT_END_TOKENS:]) if t <= self._largest_id]
        text = self._tokenizer.decode(last, skip_special_tokens=False)
        return text.rfind(_OPEN) > text.rfind(_CLOSE)

    def kept_tokens(self, tokens: Tokens, stop: Sequence[str]) -> int:
        """Number of tokens up to the one that completes the first text of ``stop``; all if there is none."""
        text = self.text(tokens)
        if not any(one in text for one in stop):
            return len(tokens)

        def complete(count: int) -> bool:
            so_far = self.text(tokens[:count])
            return any(one in so_far for one in stop)

        return bisect.bisect_left(range(len(tokens) + 1), x=True, key=complete)

    def read(self, tokens: Tokens, *, opened: bool, chat: Chat | None = None, stop: Sequence[str] = ()) -> Reply:
        """Read a turn. ``opened``: the prompt has begun the reasoning; ``chat``: calls of its tools are looked for."""
        tools = chat.tools if chat is not None else ()
        asked = chat.digest(0) if chat is not None and tools else b""
        key = (np.asarray(tokens, np.int32).tobytes(), opened, asked, tuple(stop))
        return self._known.get(key, lambda: self._read(tokens, opened=opened, tools=tools, stop=stop))

    def _read(self, tokens: Tokens, *, opened: bool, tools: Sequence[dict[str, Any]], stop: Sequence[str]) -> Reply:
        text = _until(self.text(tokens), stop)
        if self._own:
            marked = self._tokenizer.decode(
                [t for t in map(int, tokens) if t <= self._largest_id and t not in self.ends]
            )
            if (reply := self._read_by_template(_until(marked, stop), opened=opened, tools=tools)) is not None:
                return reply
        reasoning = None
        if self._thinks:
            reasoning, text = _split_reasoning(text, opened=opened, calls=bool(tools))
        if not tools:
            return Reply(text, reasoning)
        content, calls = split_calls(text, tools)
        if self._own and not calls:  # what does not fit the model's own form is a call that has gone wrong
            return Reply("", reasoning, (unreadable_call(text),))
        return Reply(content, reasoning, calls)

    def _read_by_template(self, text: str, *, opened: bool, tools: Sequence[dict[str, Any]]) -> Reply | None:
        """The reply as the tokenizer's own template reads it; None if the text does not fit the template."""
        try:
            prefix = f"{_OPEN}\n" if opened else ""
            found = self._tokenizer.parse_response(text, prefix=prefix, tools=list(tools) or None)
            calls = [call.get("function", call) for call in found.get("tool_calls") or []]
            given = [arguments_object(call.get("arguments")) for call in calls]
            made = tuple(
                ToolCall(str(c["name"]), written(a)) for c, a in zip(calls, given, strict=True) if a is not None
            )
            if len(made) < len(calls) or (made and not tools):
                return None
            return Reply(str(found.get("content") or ""), found.get("thinking") or found.get("reasoning_content"), made)
        except Exception:  # noqa: BLE001 (a template is the model's, and what the model wrote may not fit it)
            return None


def _until(text: str, stop: Sequence[str]) -> str:
    """``text`` up to the first of ``stop`` in it."""
    places = [place for one in stop if (place := text.find(one)) >= 0]
    return text[: min(places)] if places else text


def _split_reasoning(text: str, *, opened: bool, calls: bool) -> tuple[str | None, str]:
    begun = text.lstrip()
    if begun.startswith(_OPEN):
        text = begun[len(_OPEN) :]
    elif not opened:
        return None, text
    reasoning, closed, content = text.partition(_CLOSE)
    if not closed and calls and OPEN_CALL in text:  # as vLLM reads it
        reasoning, opening, call = text.partition(OPEN_CALL)
        return (reasoning.strip("\n") or None), opening + call
    return (reasoning.strip("\n") or None), (content.lstrip("\n") if closed else "")
