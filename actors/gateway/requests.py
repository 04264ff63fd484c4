"""What agents send, as typed requests: each field is checked here, refused with its name, or ignored on purpose.

    JSON ──msgspec──▶ ChatRequest, GenerateRequest, … ──▶ Question, or HttpProblem(400, field, what to do)

Invariants
- The job says how tokens are drawn: temperature, top_p, top_k, min_p, seed and stop tokens of a request are ignored.
  Otherwise the trainer would learn from another distribution than the one that it computes.
- A setting that would change the reply and is not served is refused, never ignored: several choices, a forced form or
  tool.
- Fields that are not named here are ignored, as other servers ignore them.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, Final, TypeVar, cast

import msgspec
import numpy as np

from actors.gateway.errors import HttpProblem, wrong
from actors.gateway.rendering import Chat, Message
from actors.gateway.tool_calls import arguments_object
from actors.gateway.walk import Question
from configs.checks.checks import OWN_TEMPLATE_ARGUMENTS

T = TypeVar("T")
_ROLES: Final = ("system", "user", "assistant", "tool")
_LARGEST: Final = int(np.iinfo(np.int32).max)
"""Largest token id, or count of tokens, that the ledger can hold."""
_NEUTRAL: Final[dict[str, tuple[float, ...]]] = {
    "temperature": (1.0,),
    "top_p": (1.0,),
    "top_k": (-1, 0),
    "min_p": (0.0,),
}
"""Values that SDKs send by default."""
_DRAWN: Final = "tokens are drawn as the job says; remove it"


class Sampling(msgspec.Struct, kw_only=True):
    """Holds the settings of a request for drawing tokens."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    n: int | None = None
    best_of: int | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    min_tokens: int | None = None
    ignore_eos: bool | None = None
    prompt_logprobs: int | None = None
    structured_outputs: Any = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    max_tokens: int | None = None

    def check(self) -> None:
        """Raise HttpProblem for settings that would change the reply and are not served."""
        for name in ("n", "best_of"):
            if (value := getattr(self, name)) not in (None, 1):
                fix = "an episode is one line of turns; ask again for another, or raise algorithm.group_size in the job"
                raise _not_served(name, fix, value)
        for name, neutral in (("presence_penalty", 0), ("frequency_penalty", 0), ("repetition_penalty", 1)):
            if (value := getattr(self, name)) not in (None, neutral):
                raise _not_served(name, _DRAWN, value)
        for name in ("logit_bias", "min_tokens", "ignore_eos", "prompt_logprobs", "structured_outputs"):
            if getattr(self, name):
                raise _not_served(name, _DRAWN)

    def stops(self) -> tuple[str, ...]:
        """Texts that end the answer."""
        stop = [self.stop] if isinstance(self.stop, str) else self.stop or []
        if not all(stop):
            raise wrong("stop", "an empty text would end every answer before it begins; remove it")
        return tuple(stop)

    def ignored(self, job: dict[str, float], ends: Collection[int]) -> list[str]:
        """Names of settings that are neither the job's nor an SDK's default. ``ends``: tokens that end a turn."""
        found = [
            name
            for name, neutral in _NEUTRAL.items()
            if (value := getattr(self, name)) is not None and value not in (*neutral, job.get(name))
        ]
        if any(token not in ends for token in self.stop_token_ids or ()):
            found.append("stop_token_ids")
        return [*found, *(["seed"] if self.seed is not None else [])]

    def limit(self, tokens: int | None, name: str) -> int | None:
        """``tokens``, the most that the answer may have; raises HttpProblem if that is no number of tokens."""
        if tokens is not None and not 1 <= tokens <= _LARGEST:
            raise wrong(name, f"{tokens} is no number of tokens; expected at least 1")
        return tokens


class StreamOptions(msgspec.Struct):
    include_usage: bool | None = False


class ChatRequest(Sampling, kw_only=True):
    """Is the body of POST /v1/chat/completions, and of the same with ``tokens``."""

    messages: list[dict[str, Any]]
    model: str | None = None
    tokens: list[int] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    functions: Any = None
    response_format: dict[str, Any] | None = None
    max_completion_tokens: int | None = None
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    logprobs: bool | None = False
    top_logprobs: int | None = None
    return_token_ids: bool | None = False
    return_tokens_as_token_ids: bool | None = False
    chat_template_kwargs: dict[str, Any] | None = None

    def chat(self) -> Chat:
        return chat_of(self.messages, None if self.tool_choice == "none" else self.tools, self.chat_template_kwargs)

    def question(self, *, is_retry: bool, with_tokens: bool) -> Question:
        """The request as a question. Raises HttpProblem for what is not served."""
        self.check()
        if self.response_format and self.response_format.get("type", "text") != "text":
            fix = "tokens are drawn as the job says, so no form can be forced; ask for it in the messages"
            raise _not_served("response_format", fix, repr(self.response_format.get("type")))
        if self.tool_choice not in (None, "auto", "none"):
            raise _not_served("tool_choice", "no call can be forced; use auto or none", _shown(self.tool_choice))
        if self.functions:
            raise _not_served("functions", "use tools")
        if self.top_logprobs:
            fix = "the log-probability of the drawn token alone is recorded; remove it"
            raise _not_served("top_logprobs", fix, self.top_logprobs)
        limit = self.limit(self.max_completion_tokens, "max_completion_tokens") or self.limit(
            self.max_tokens, "max_tokens"
        )
        tokens = checked_ids("tokens", self.tokens) if with_tokens else None
        return Question(self.chat(), tokens, self.stops(), limit, is_retry)


class SamplingParams(Sampling, kw_only=True):
    """Holds what vLLM calls ``sampling_params``."""

    logprobs: int | None = None
    skip_special_tokens: bool | None = None


class GenerateRequest(msgspec.Struct, kw_only=True):
    """Is the body of POST /inference/v1/generate: tokens in, tokens out."""

    token_ids: list[int]
    sampling_params: SamplingParams = msgspec.field(default_factory=SamplingParams)
    model: str | None = None
    stream: bool | None = False
    request_id: str | None = None

    def question(self, *, is_retry: bool) -> Question:
        self.sampling_params.check()
        if self.stream:
            raise wrong("stream", "is served by chat completions alone: leave it out", "unsupported_value")
        if (self.sampling_params.logprobs or 0) > 1:
            raise wrong(
                "sampling_params.logprobs", "at most 1: that of the drawn token is recorded", "unsupported_value"
            )
        limit = self.sampling_params.limit(self.sampling_params.max_tokens, "sampling_params.max_tokens")
        tokens = checked_ids("token_ids", self.token_ids)
        return Question(None, tokens, self.sampling_params.stops(), limit, is_retry)


class TokenizeRequest(msgspec.Struct, kw_only=True):
    """Is the body of POST /tokenize: a text, or messages."""

    model: str | None = None
    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = True
    return_token_strs: bool | None = False
    tools: list[dict[str, Any]] | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class EndRequest(msgspec.Struct, kw_only=True):
    """Is the body of POST /v1/episodes/end: a reward, or why there is none."""

    reward: float | None = None
    failure: str | None = None
    metrics: dict[str, float] = msgspec.field(default_factory=dict[str, float])


def parsed(body: bytes, kind: type[T]) -> T:
    """``body`` as a request.

    Raises:
        HttpProblem: the body is no JSON, or a field is of the wrong type; the field is named.
    """
    try:
        return msgspec.json.decode(body, type=kind)
    except msgspec.ValidationError as error:
        text, _, path = str(error).partition(" - at `$")
        field = path.strip("`").lstrip(".") or _missing(text) or "body"
        raise HttpProblem(400, "invalid_type", f"{field}: {text}", param=field) from error
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise HttpProblem(400, "invalid_json", f"body: this is no JSON object ({error})", param="body") from error


def _not_served(param: str, fix: str, value: object = None) -> HttpProblem:
    """The problem of a field that is not served, or not with this ``value``."""
    return wrong(param, f"{'' if value is None else f'{value} '}is not served: {fix}", "unsupported_value")


def _missing(text: str) -> str:
    return text.split("`")[-2] if text.startswith("Object missing required field") else ""


def checked_ids(name: str, ids: list[int] | None) -> tuple[int, ...]:
    if not ids:
        raise wrong(name, "expected a list of token ids, at least one")
    if not 0 <= min(ids) <= max(ids) <= _LARGEST:
        raise wrong(name, f"{min(ids)} … {max(ids)} are no token ids")
    return tuple(ids)


def chat_of(
    messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None, arguments: dict[str, Any] | None
) -> Chat:
    """A conversation in the form that templates take.

    Raises:
        HttpProblem: names the message and the field.
    """
    if not messages:
        raise wrong("messages", "expected at least one message")
    own = [name for name in arguments or {} if name in (*OWN_TEMPLATE_ARGUMENTS, "chat_template", "tools")]
    if own:
        raise wrong(f"chat_template_kwargs.{own[0]}", "is set by the gateway; remove it", "unsupported_value")
    for place, tool in enumerate(tools or []):
        if not isinstance(tool.get("function"), dict) or not isinstance(tool["function"].get("name"), str):
            raise wrong(f"tools[{place}]", "expected {type: function, function: {name, parameters}}")
    made = tuple(_message(message, f"messages[{place}]") for place, message in enumerate(messages))
    return Chat(made, tuple(tools or ()), tuple(sorted((arguments or {}).items())))


def _message(message: dict[str, Any], where: str) -> Message:
    role = message.get("role")
    role = "system" if role == "developer" else role
    if role not in _ROLES:
        raise wrong(f"{where}.role", f"{_shown(message.get('role'))} is none of {', '.join(_ROLES)}")
    made = {key: value for key, value in message.items() if value is not None} | {"role": role}
    made["content"] = _text(message.get("content"), f"{where}.content")
    if calls := message.get("tool_calls"):
        if not isinstance(calls, list):
            raise wrong(f"{where}.tool_calls", "expected a list")
        made["tool_calls"] = [
            _call(call, f"{where}.tool_calls[{i}]") for i, call in enumerate(cast("list[Any]", calls))
        ]
    for key in ("reasoning_content", "reasoning"):
        if not isinstance(made.get(key, ""), str):
            raise wrong(f"{where}.{key}", "expected a text")
    return made


def _text(content: object, where: str) -> str:
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise wrong(where, "expected a text, or a list of parts of type text")
    texts: list[str] = []
    for i, part in enumerate(cast("list[Any]", content)):
        if (
            not isinstance(part, dict)
            or part.get("type") not in ("text", "input_text")
            or not isinstance(part.get("text"), str)
        ):
            raise wrong(
                f"{where}[{i}]", "expected a part of type text: images and sounds are not served", "unsupported_value"
            )
        texts.append(part["text"])
    return "\n".join(texts)


def _call(call: object, where: str) -> dict[str, Any]:
    """A tool call with its arguments as an object, as templates want them."""
    function = cast("dict[str, Any]", call).get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise wrong(where, "expected {id, type: function, function: {name, arguments}}")
    given = function.get("arguments")
    arguments = arguments_object(given)
    return cast("dict[str, Any]", call) | {
        "function": function | {"arguments": given if arguments is None else arguments}
    }


def _shown(value: object) -> str:
    return repr(value)[:80]
