"""The model as one episode reaches it: an OpenAI-style endpoint, asked with the standard library alone.

    chat ─ POST …/chat/completions ─▶ 200 ─▶ the model's message
                 ├─ no connection, cut off, 429, 5xx ─▶ asked again, with growing pauses, while the episode has time;
                 │                                      then GatewayAway
                 ├─ silence for gateway_silence_s ─────▶ asked again: the gateway computes equal questions only once
                 ├─ 400 budget_spent, or time is over ─▶ BudgetSpent, also for a context that has grown too long;
                 │                                      ContextFull if the first messages alone are too long
                 ├─ 410, 401 key_expired ─────────────▶ SessionOver
                 └─ anything else ────────────────────▶ GatewayRefused

Asking twice is harmless: a turn that the ledger holds is answered from it, and no token is sampled again. So a restart
of the gateway or of the head costs the episode nothing but the wait.
"""

from __future__ import annotations

import http.client
import json
import ssl
import time
from collections.abc import Mapping, Sequence
from typing import Any, Final, cast
from urllib.parse import urlsplit

from actors.environments.episodes.errors import BudgetSpent, ContextFull, GatewayAway, GatewayRefused, SessionOver
from actors.environments.episodes.interface import ChatMessage
from configs.limits import DEFAULT_LIMITS, Limits

_ASK_AGAIN: Final = frozenset([408, 409, 425, 429])
"""Statuses below 500 after which the same question may get an answer when it is asked again."""
_REPEATS: Final = "x-stainless-retry-count"
"""Header of OpenAI's clients: how often this very question has been asked before."""
_READ_BYTES: Final = 1 << 16


class Endpoint:
    """An endpoint answers for one episode. ``base_url``, ``api_key`` and ``model`` suit any OpenAI-style client too."""

    def __init__(
        self,
        base_url: str,
        api_key: str,
        model: str,
        *,
        left_s: float,
        limits: Limits = DEFAULT_LIMITS,
        certificate: str | None = None,
    ) -> None:
        """``certificate``: a PEM file that the gateway's certificate is checked against; None: those of the system."""
        self.base_url = base_url
        """URL of the gateway, which ends with ``/v1``."""
        self.api_key = api_key
        self.model = model
        self._ends_s = time.monotonic() + left_s
        self._limits = limits
        self._certificate = certificate
        self._connection: http.client.HTTPConnection | None = None

    @property
    def left_s(self) -> float:
        return self._ends_s - time.monotonic()

    def chat(self, messages: Sequence[ChatMessage], tools: Sequence[Mapping[str, Any]] = ()) -> ChatMessage:
        """The model's next message. Append it unchanged: the next call's messages must repeat what the model has said.

        Raises:
            BudgetSpent, SessionOver, GatewayAway, GatewayRefused: see the module's docstring.
        """
        question: dict[str, Any] = {"model": self.model, "messages": messages}
        if tools:
            question["tools"] = tools
        try:
            reply = self.ask("/chat/completions", question)
        except ContextFull as full:
            if not any(message.get("role") == "assistant" for message in messages):
                raise  # the prompt alone is too long, which no turn of the model has caused
            raise BudgetSpent("context") from full
        return reply["choices"][0]["message"]

    def ask(self, path: str, question: Mapping[str, Any]) -> dict[str, Any]:
        """POST ``question``, again and again while the episode has time; the answer as JSON. Raises as ``chat``."""
        data = json.dumps(question, ensure_ascii=False).encode("utf-8", "replace")  # a lone surrogate must not fail
        pause_s, away, repeats = self._limits.backoff_first_s, "", -1
        while True:
            repeats += 1
            if self.left_s <= 0:
                raise (
                    GatewayAway(f"the gateway at {self.base_url} did not answer: {away}")
                    if away
                    else BudgetSpent("time")
                )
            try:
                status, text = self._post(path, data, repeats)
            except TimeoutError:
                away = ""
                continue
            except (OSError, http.client.HTTPException) as error:
                away = f"{type(error).__name__}: {error}"
            else:
                answer, away = _answer_of(status, text)
                if answer is not None:
                    return answer
            self.close()
            time.sleep(max(0.0, min(pause_s, self.left_s)))
            pause_s = min(2 * pause_s, self._limits.backoff_max_s)

    def _post(self, path: str, data: bytes, repeats: int) -> tuple[int, bytes]:
        where = urlsplit(self.base_url)
        timeout_s = max(self._limits.backoff_first_s, min(self.left_s, self._limits.gateway_silence_s))
        try:
            connection = self._connect(timeout_s)
            head = {"Authorization": f"Bearer {self.api_key}", "Content-Type": "application/json"}
            head[_REPEATS] = str(repeats)
            connection.request("POST", where.path + path, data, head)
            response = connection.getresponse()
            parts: list[bytes] = []
            while part := response.read1(_READ_BYTES):  # white space says that the model is still generating
                parts.append(part)
                if self.left_s <= 0:
                    raise BudgetSpent("time")
            response.read()  # reads nothing, but http.client needs it before the connection can be used again
            return response.status, b"".join(parts)
        except BaseException:
            self.close()
            raise

    def _connect(self, timeout_s: float) -> http.client.HTTPConnection:
        if self._connection is None:
            where = urlsplit(self.base_url)
            host, port = where.hostname or "", where.port
            if where.scheme == "https":
                trusted = ssl.create_default_context(cafile=self._certificate)
                self._connection = http.client.HTTPSConnection(host, port, timeout=timeout_s, context=trusted)
            else:
                self._connection = http.client.HTTPConnection(host, port, timeout=timeout_s)
        self._connection.timeout = timeout_s
        if self._connection.sock is not None:
            self._connection.sock.settimeout(timeout_s)
        return self._connection

    def close(self) -> None:
        """Close the connection, if there is one; the next question connects anew."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None


def _answer_of(status: int, text: bytes) -> tuple[dict[str, Any] | None, str]:
    """The answer; or None, and why to ask again. Raises an error where asking again would not help."""
    try:
        said: Any = json.loads(text)
    except ValueError:
        said = None  # cut off, or not from the gateway
    body = cast("dict[str, Any]", said) if isinstance(said, dict) else {}
    error: Any = body.get("error")  # after white space an error comes with the status 200, which was sent before it
    if status == 200 and body and error is None:
        return body, ""
    told = cast("dict[str, Any]", error) if isinstance(error, dict) else {}
    code, message = told.get("code"), str(told.get("message") or text[:200].decode("utf-8", "replace"))
    if code == "budget_spent":
        raise BudgetSpent(str(told.get("param") or "turns"))
    if status == 410 or code in ("episode_ended", "key_expired"):
        raise SessionOver(message)
    if code == "context_length_exceeded":
        raise ContextFull(f"{message} ({code})")
    if 400 <= status < 500 and status not in _ASK_AGAIN:
        raise GatewayRefused(f"the gateway refuses the request with status {status}: {message}")
    return None, f"status {status}: {message}"
