"""Speaks HTTP with one ``vllm serve`` process: short questions, orders, and a stream for each sequence.

Invariants
- A server that is not there, closes a connection, or is silent for longer than it may be is ``ServerGone``; an answer
  with another status than 200 is ``ServerRefuses``, which has its text; one by which a proxy says that nobody is behind
  it (502 to 504) is ``ServerGone``.
- Answers are read into types, and one that does not fit is an EngineError that names the address and the path.
- What is sent goes to the named address alone: a redirect is refused as any other status.
- A stream ends with the task that reads it: that closes the connection, and the server aborts the sequence.
- The key for ``--api-key`` comes from the environment (``VLLM_API_KEY``, as the server has it), and is never logged.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Mapping
from typing import Any, Final, TypeVar

import aiohttp
import msgspec

from actors.rollout.errors import EngineError, ServerGone, ServerRefuses

API_KEY_VARIABLE: Final = "VLLM_API_KEY"
GENERATE: Final = "/inference/v1/generate"
_DATA: Final = b"data: "
_DONE: Final = b"[DONE]"
_LINE_BYTES: Final = 4 << 20
"""Longest line of a stream: what a server has gathered of one sequence while nobody read, 150 bytes a token."""
_ANSWER_BYTES: Final = 16 << 20
"""Longest answer that is read whole; what a server says of itself is a few kilobytes."""
_SHOWN_CHARS: Final = 300
_AWAY: Final = (502, 503, 504)
"""Statuses of a proxy without a server behind it, and of a server whose engine has ended."""

T = TypeVar("T")


class Logprob(msgspec.Struct, frozen=True):
    """Log-probability of one token that was drawn."""

    token_id: int
    logprob: float


class Logprobs(msgspec.Struct, frozen=True):
    """Log-probabilities of the tokens of one chunk, in their order."""

    content: list[Logprob]


class VersionSpan(msgspec.Struct, frozen=True):
    """Output tokens ``[start, end)`` were computed by the weights labelled ``version``."""

    version: str
    start: int
    end: int


class Choice(msgspec.Struct, frozen=True):
    """Tokens of one sequence that came together."""

    token_ids: list[int]
    logprobs: Logprobs | None = None
    finish_reason: str | None = None
    weight_versions: list[VersionSpan] | None = None
    """Versions of the whole output; they come with the last tokens."""


class Chunk(msgspec.Struct, frozen=True):
    """One event of a stream."""

    choices: list[Choice] = []
    error: msgspec.Raw | None = None


class WeightInfo(msgspec.Struct, frozen=True):
    """Label of the weights that the server serves."""

    weight_version: str


async def _bounded(answer: aiohttp.ClientResponse) -> bytes:
    """The answer's body, as far as it is read."""
    parts, left = list[bytes](), _ANSWER_BYTES
    async for part in answer.content.iter_chunked(min(left, 1 << 16)):
        parts.append(part[:left])
        left -= len(parts[-1])
        if left <= 0:
            break
    return b"".join(parts)


class ServerClient:
    """Asks and orders one server. ``answer_s``: longest time of a short answer, and of making a connection."""

    def __init__(self, url: str, answer_s: float) -> None:
        self.url = url.rstrip("/")
        self._answer_s = answer_s
        self._session: aiohttp.ClientSession | None = None

    async def open(self) -> None:
        key = os.environ.get(API_KEY_VARIABLE, "")
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, force_close=True),  # an idle connection may be closed as it is used
            headers={"Authorization": f"Bearer {key}"} if key else None,
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=self._answer_s),
            read_bufsize=_LINE_BYTES,
        )

    async def close(self) -> None:
        session, self._session = self._session, None
        if session is not None:
            await session.close()

    async def label(self) -> str:
        """Label of the weights that are served now, between two steps of the server's engine."""
        return (await self.get("/weight_info", WeightInfo)).weight_version

    async def get(self, path: str, answer: type[T]) -> T:
        return self._read(path, await self.call("GET", path), answer)

    async def text(self, path: str) -> str:
        return (await self.call("GET", path)).decode(errors="replace")

    async def post(self, path: str, body: Mapping[str, Any] | None = None, *, timeout_s: float | None = None) -> bytes:
        return await self.call("POST", path, body, timeout_s=timeout_s)

    async def call(
        self, method: str, path: str, body: Mapping[str, Any] | None = None, *, timeout_s: float | None = None
    ) -> bytes:
        """The whole answer, within ``timeout_s`` (default: ``answer_s``).

        Raises:
            ServerGone: there was none in time.
            ServerRefuses: its status is not 200.
        """
        try:
            async with (
                asyncio.timeout(timeout_s or self._answer_s),
                self._live.request(method, self.url + path, json=body, allow_redirects=False) as answer,
            ):
                content = await _bounded(answer)
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            raise self._gone(path, error) from error
        if answer.status != 200:
            raise self._refusal(path, answer.status, content)
        return content

    async def generate(self, body: Mapping[str, Any]) -> AsyncIterator[Choice]:
        """Tokens of one sequence as they come, until the server has said all of it.

        Raises:
            ServerGone, ServerRefuses: as ``call``; the stream broke off.
            EngineError: the server's engine failed, or its answer cannot be read.
        """
        whole = False
        try:
            order = {**body, "stream": True}
            async with self._live.post(self.url + GENERATE, json=order, allow_redirects=False) as answer:
                if answer.status != 200:
                    async with asyncio.timeout(self._answer_s):
                        said = await _bounded(answer)
                    raise self._refusal(GENERATE, answer.status, said)
                async for line in answer.content:
                    if not line.startswith(_DATA):
                        continue
                    if whole := line.startswith(_DONE, len(_DATA)):
                        continue
                    for choice in self._chunk(line[len(_DATA) :]).choices:
                        yield choice
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            raise self._gone(GENERATE, error) from error
        if not whole:
            raise ServerGone(f"the server at {self.url} has broken off a stream of {GENERATE}")

    def _chunk(self, text: bytes) -> Chunk:
        chunk = self._read(GENERATE, text, Chunk)
        if chunk.error is not None:
            said = bytes(chunk.error).decode(errors="replace")
            raise EngineError(f"the server at {self.url} has failed with a sequence: {said[:_SHOWN_CHARS]}")
        return chunk

    def _read(self, path: str, content: bytes, answer: type[T]) -> T:
        try:
            return msgspec.json.decode(content, type=answer)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            said = content[:_SHOWN_CHARS].decode(errors="replace").strip()
            raise EngineError(
                f"the server at {self.url} answers {path} with {said!r}, which is not what vLLM says there ({error}). "
                "rollout.servers: expected addresses of vllm serve"
            ) from error

    @property
    def _live(self) -> aiohttp.ClientSession:
        if self._session is None:
            raise EngineError("the engine is not started")
        return self._session

    def _refusal(self, path: str, status: int, said: bytes) -> EngineError:
        refuses = ServerRefuses(self.url, path, status, said.decode(errors="replace"))
        return ServerGone(str(refuses)) if status in _AWAY else refuses

    def _gone(self, path: str, error: Exception) -> ServerGone:
        why = "silent" if isinstance(error, asyncio.TimeoutError) else f"{type(error).__name__}: {error}"
        return ServerGone(f"the server at {self.url} is gone ({path}: {why})")
