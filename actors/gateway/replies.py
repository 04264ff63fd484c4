"""A turn as an agent reads it: the model's tokens become reasoning, content and calls of tools.

    ids ── without end tokens ──▶ text ── cut at a stop string ──▶ <think>…</think> │ content │ <tool_call>…</tool_call>

Invariants
- Reading is a function of the tokens and of what was asked, so a turn that is read again says the same: calls of tools
  too, whose ids come from the turn's number.
- What is no well-formed call stays content, as the model wrote it: nothing that it says is lost, or made up.
- Reasoning is told apart only where the chat template knows it.

Calls of tools are read in the form of Hermes and Qwen (JSON), in that of Qwen-Coder (XML), or by the tokenizer's own
``response_schema`` where it brings one.
"""

from __future__ import annotations

import bisect
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, cast

import numpy as np

from actors.gateway.remembered import Remembered

Tokens = Sequence[int] | np.ndarray
_OPEN, _CLOSE = "<think>", "</think>"
_CALL: Final = re.compile(r"<tool_call>\s*(.*?)\s*</tool_call>", re.DOTALL)
_FUNCTION: Final = re.compile(r"<function=([^>\s]+)>(.*?)</function>", re.DOTALL)
_PARAMETER: Final = re.compile(r"<parameter=([^>\s]+)>\n?(.*?)\n?</parameter>", re.DOTALL)
_MARKERS: Final = (_OPEN, _CLOSE, "<tool_call>", "</tool_call>")
_PROMPT_END_TOKENS: Final = 16
"""A generation prompt that opens the reasoning ends with fewer tokens than these."""


@dataclass(frozen=True, slots=True)
class ToolCall:
    """It is a call as the model wrote it."""

    name: str
    arguments: str
    """JSON object, as OpenAI's API has it."""


@dataclass(frozen=True, slots=True)
class Reply:
    """It is one turn as its agent reads it."""

    content: str
    reasoning: str | None = None
    calls: tuple[ToolCall, ...] = ()

    @property
    def characters(self) -> int:
        return len(self.content) + len(self.reasoning or "") + sum(len(call.arguments) for call in self.calls)

    def is_said_by(self, message: dict[str, Any]) -> bool:
        """Whether an assistant's message of a request is this turn. Agents trim, and drop the reasoning."""
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


def json_value(text: str) -> Any:
    """What ``text`` says as JSON.

    Raises:
        ValueError: it is none, or not every reader takes it: NaN, half a surrogate pair, nested too deeply.
    """
    try:
        value = json.loads(text)
        json.dumps(value, ensure_ascii=False, allow_nan=False).encode()
    except RecursionError as error:
        raise ValueError(f"nested too deeply: {error}") from error
    return value


def _plain(arguments: object) -> object:
    if not isinstance(arguments, str):
        return arguments
    try:
        return json_value(arguments)
    except ValueError:
        return arguments


class ReplyReader:
    """Reads turns for one tokenizer and its chat template. ``kept``: turns that are remembered as they were read,
    of ``most`` characters together.
    """

    def __init__(self, tokenizer: Any, ends: Sequence[int], kept: int, most: int) -> None:
        self._known = Remembered[Reply](kept, most, lambda reply: reply.characters)
        self._tokenizer = tokenizer
        self.ends = frozenset(ends)
        """Tokens that end a turn."""
        specials = {int(i) for i in tokenizer.all_special_ids}
        shown = {tokenizer.convert_tokens_to_ids(marker) for marker in _MARKERS}
        self._hidden = (specials - shown) | self.ends
        self._largest_id = max(tokenizer.get_vocab().values(), default=-1)
        template = tokenizer.chat_template
        self._thinks = _CLOSE in str(template) or "reasoning_content" in str(template)
        self._own = getattr(tokenizer, "response_schema", None) is not None
        self._texts: dict[int, str] = {}

    def text(self, tokens: Tokens) -> str:
        """Their text, without what ends a turn and without special tokens."""
        shown = [t for t in map(int, tokens) if t not in self._hidden and t <= self._largest_id]
        return cast("str", self._tokenizer.decode(shown, skip_special_tokens=False))

    def token_text(self, token: int) -> str:
        """The text of one token by itself."""
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
        """How many tokens a turn keeps that is cut at ``stop``: up to the one that completes the first such text."""
        text = self.text(tokens)
        if not any(one in text for one in stop):
            return len(tokens)

        def complete(count: int) -> bool:
            so_far = self.text(tokens[:count])
            return any(one in so_far for one in stop)

        return bisect.bisect_left(range(len(tokens) + 1), x=True, key=complete)

    def read(self, tokens: Tokens, *, opened: bool, tools: bool, stop: Sequence[str] = ()) -> Reply:
        """``opened``: the prompt has begun the reasoning; ``tools``: calls are looked for."""
        key = (np.asarray(tokens, np.int32).tobytes(), opened, tools, tuple(stop))
        return self._known.get(key, lambda: self._read(tokens, opened=opened, tools=tools, stop=stop))

    def _read(self, tokens: Tokens, *, opened: bool, tools: bool, stop: Sequence[str]) -> Reply:
        text = self.text(tokens)
        places = [place for one in stop if (place := text.find(one)) >= 0]
        if places:
            text = text[: min(places)]
        if self._own and (reply := self._read_by_schema(text, tools=tools)) is not None:
            return reply
        reasoning = None
        if self._thinks:
            reasoning, text = _split_reasoning(text, opened=opened)
        if not tools:
            return Reply(text, reasoning)
        content, calls = _split_calls(text)
        return Reply(content, reasoning, calls)

    def _read_by_schema(self, text: str, *, tools: bool) -> Reply | None:
        """What the tokenizer's own schema makes of it; None if it does not fit."""
        try:
            found = self._tokenizer.parse_response(text)
            calls = [call.get("function", call) for call in found.get("tool_calls") or []] if tools else []
            made = tuple(ToolCall(str(c["name"]), json.dumps(c["arguments"], ensure_ascii=False)) for c in calls)
            for call in made:
                json_value(call.arguments)
            return Reply(str(found.get("content") or ""), found.get("thinking") or found.get("reasoning_content"), made)
        except Exception:  # noqa: BLE001 (a schema is the model's, and what the model wrote may not fit it)
            return None


def _split_reasoning(text: str, *, opened: bool) -> tuple[str | None, str]:
    begun = text.lstrip()
    if begun.startswith(_OPEN):
        text = begun[len(_OPEN) :]
    elif not opened:
        return None, text
    reasoning, closed, content = text.partition(_CLOSE)
    return (reasoning.strip("\n") or None), (content.lstrip("\n") if closed else "")


def _split_calls(text: str) -> tuple[str, tuple[ToolCall, ...]]:
    calls: list[ToolCall] = []
    content, end = "", 0
    for block in _CALL.finditer(text):
        call = _call(block[1])
        if call is not None:
            calls.append(call)
            content, end = content + text[end : block.start()], block.end()
    content += text[end:]
    return (content.strip() if calls else content), tuple(calls)


def _call(written: str) -> ToolCall | None:
    if function := _FUNCTION.fullmatch(written):
        given = {name: _value(value) for name, value in _PARAMETER.findall(function[2])}
        return ToolCall(function[1], json.dumps(given, ensure_ascii=False))
    try:
        call = json_value(written)
    except ValueError:
        return None
    if not isinstance(call, dict) or not isinstance(call.get("name"), str):
        return None
    arguments = call.get("arguments", call.get("parameters", {}))
    return ToolCall(call["name"], json.dumps(arguments, ensure_ascii=False)) if isinstance(arguments, dict) else None


def _value(text: str) -> Any:
    try:
        return json_value(text)
    except ValueError:
        return text
