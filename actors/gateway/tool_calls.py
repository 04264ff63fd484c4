"""Tool calls in the text of a turn, read from each opening tag on, so that tags inside a JSON string close nothing.

    <tool_call>{"name": …, "arguments": {…}}</tool_call>                                  Hermes, Qwen
    <tool_call><function=NAME><parameter=KEY>VALUE</parameter></function></tool_call>     Qwen-Coder

Invariants
- Several calls are read in order: a tag each, or several values or a list in one tag. Text around them is content.
- Arguments may be absent, empty, or an object that is written as a JSON string.
- A call that cannot be read is a call all the same, with what the model wrote as its arguments: whoever answers calls
  says that these are no JSON object, and the model reads it. It is never the model's answer.
- An opening tag without a closing one that no call follows is text: a model may speak of tags.
- A turn of nothing but broken calls is read in time that grows with its length: behind the first ``UNREADABLE_CALLS``
  that cannot be read, the rest of the turn is one more of them.
"""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, cast

UNREADABLE_CALLS: Final = 64
"""Number of unreadable calls of a turn that are told one by one; each may have been looked for up to the turn's end."""
OPEN_CALL, CLOSE_CALL = "<tool_call>", "</tool_call>"
_TAG: Final = re.compile(r"</?tool_call>")
_NAME: Final = re.compile(r'"name"\s*:\s*"([^"\\]+)"|<function=([^>\s]+)')
_PARAMETER: Final = re.compile(r"\s*<parameter=([^>\s]+)>\n?(.*?)\n?</parameter>\s*(?=<parameter=|\Z)", re.DOTALL)
_BEGIN_FUNCTION, _END_FUNCTION = "<function=", "</function>"
_ENDS_TRIED: Final = 16
"""Number of closing tags of a function that are looked at; a program in a parameter may hold some."""
_DECODER: Final = json.JSONDecoder()
Tools = Sequence[Mapping[str, Any]]


@dataclass(frozen=True, slots=True)
class ToolCall:
    """Holds one tool call of the model."""

    name: str
    """Name of the tool; empty where the model has written none."""
    arguments: str
    """JSON object as text, as in OpenAI's API; or what the model wrote, where that is no call."""


def json_value(text: str) -> Any:
    """The value of ``text``, read as JSON.

    Raises:
        ValueError: the text is no JSON, or not for every reader: NaN, half a surrogate pair, nested too deeply.
    """
    try:
        return _checked(json.loads(text))
    except RecursionError as error:
        raise ValueError(f"nested too deeply: {error}") from error


def written(value: object) -> str:
    """``value`` as JSON. Raises ValueError: it is no value that every reader can read."""
    text = json.dumps(value, ensure_ascii=False, allow_nan=False)
    text.encode()
    return text


def _checked(value: Any) -> Any:
    written(value)
    return value


def arguments_object(given: object) -> dict[str, Any] | None:
    """The arguments of a call as an object, also where they are empty or a JSON string; None: they are no object."""
    if isinstance(given, str):
        try:
            given = json_value(given) if given.strip() else None
        except ValueError:
            return None
    if given is None or given == []:
        return {}
    return cast("dict[str, Any]", given) if isinstance(given, dict) else None


def split_calls(text: str, tools: Tools) -> tuple[str, tuple[ToolCall, ...]]:
    """The content of ``text``, and its calls of ``tools`` in order."""
    calls: list[ToolCall] = []
    content: list[str] = []
    end = unreadable = 0
    while (begin := text.find(OPEN_CALL, end)) >= 0:
        content.append(text[end:begin])
        if unreadable == UNREADABLE_CALLS:
            calls.append(unreadable_call(text[begin:]))
            end = len(text)
            break
        found, end, is_read = _block(text, begin + len(OPEN_CALL), tools)
        calls += found
        unreadable += not is_read
        content.append("" if found else OPEN_CALL)
    said = "".join([*content, text[end:]])
    return (said.strip() if calls else said), tuple(calls)


def _block(text: str, begin: int, tools: Tools) -> tuple[list[ToolCall], int, bool]:
    """The calls behind the opening tag that ends at ``begin``, where they end, and whether they could be read.

    None: nothing there is a call.
    """
    at, calls = _behind_space(text, begin), list[ToolCall]()
    is_function = text.startswith(_BEGIN_FUNCTION, at)
    begins_call = is_function or text[at : at + 1] in ("{", "[")
    try:
        while text[at : at + 1] in ("{", "["):
            value, end = _DECODER.raw_decode(text, at)
            values = cast("list[Any]", _checked(value) if isinstance(value, list) else [_checked(value)])
            calls += [_call(one, text[at:end]) for one in values]
            at = _behind_space(text, end)
        while text.startswith(_BEGIN_FUNCTION, at):
            call, at = _function(text, at, tools)
            calls.append(call)
    except (ValueError, RecursionError) as error:
        at, calls = max(at, getattr(error, "pos", at)), []
    if calls:
        if text.startswith(CLOSE_CALL, at):
            return calls, at + len(CLOSE_CALL), True
        if at == len(text) or text.startswith(OPEN_CALL, at):
            return calls, at, True
    tag = _TAG.search(text, at)
    closed = tag is not None and tag[0] == CLOSE_CALL
    if not closed and not begins_call:
        return [], begin, True
    end = len(text) if tag is None else tag.end() if closed else tag.start()
    return [unreadable_call(text[begin : len(text) if tag is None else tag.start()].strip())], end, False


def _behind_space(text: str, at: int) -> int:
    while text[at : at + 1].isspace():
        at += 1
    return at


def unreadable_call(said: str) -> ToolCall:
    """The call in ``said``, which cannot be read: with its name, unless somebody might take the whole for arguments."""
    named = _NAME.search(said)
    with contextlib.suppress(ValueError, RecursionError):
        json.loads(said)
        named = None
    return ToolCall((named[1] or named[2]) if named else "", said)


def _call(value: object, said: str) -> ToolCall:
    call = cast("dict[str, Any]", value) if isinstance(value, dict) else {}
    name, given = call.get("name"), call.get("arguments", call.get("parameters"))
    if not isinstance(name, str):
        return ToolCall("", said)
    arguments = arguments_object(given)
    if arguments is None:
        return ToolCall(name, given if isinstance(given, str) else written(given))
    return ToolCall(name, written(arguments))


def _function(text: str, at: int, tools: Tools) -> tuple[ToolCall, int]:
    """The call that begins at ``at``, and where the next thing begins. Raises ValueError: it is not complete."""
    named = _NAME.match(text, at)
    if named is None or text[named.end() : named.end() + 1] != ">":
        raise ValueError("a function without a name")
    end = named.end()
    for _ in range(_ENDS_TRIED):
        if (end := text.find(_END_FUNCTION, end)) < 0:
            break
        body = text[named.end() + 1 : end]
        end = _behind_space(text, end + len(_END_FUNCTION))
        if end == len(text) or _TAG.match(text, end) or text.startswith(_BEGIN_FUNCTION, end):
            with contextlib.suppress(ValueError):  # such an end may stand in a value, too
                return ToolCall(named[2], _given(named[2], body, tools)), end
    raise ValueError("a function that does not end")


def _given(name: str, body: str, tools: Tools) -> str:
    """The parameters in ``body`` as a JSON object. Raises ValueError: there is something else."""
    given: dict[str, Any] = {}
    at = 0
    while _behind_space(body, at) < len(body):
        parameter = _PARAMETER.match(body, at)
        if parameter is None:
            raise ValueError("a parameter that does not end")
        given[parameter[1]] = _value(parameter[2], _types(name, parameter[1], tools))
        at = parameter.end()
    return written(given)


def _value(text: str, types: Sequence[object]) -> Any:
    """The value of a parameter, which stays a text where the tool wants one."""
    if "string" in types and not (text == "null" and "null" in types):
        return text
    try:
        return json_value(text)
    except ValueError:
        return text


def _types(name: str, parameter: str, tools: Tools) -> Sequence[object]:
    """The JSON types that the tool's schema names for a parameter."""
    at: Any = next((tool["function"] for tool in tools if tool["function"]["name"] == name), None)
    for key in ("parameters", "properties", parameter):
        at = cast("dict[str, Any]", at).get(key) if isinstance(at, dict) else None
    if not isinstance(at, dict):
        return ()
    schema = cast("dict[str, Any]", at)
    choices: list[Any] = [schema, *(schema["anyOf"] if isinstance(schema.get("anyOf"), list) else ())]
    said = [one.get("type") for one in choices if isinstance(one, dict)]
    return [one for types in said for one in (types if isinstance(types, list) else [types])]
