"""The HTTP side of the gateway: keys, problems, and signs of life while a turn runs.

    request ─▶ room for one more? ─▶ whose key? ─▶ body, bounded ─▶ route ─▶ reply
                                                                     └─ HttpProblem ─▶ {"error": …} and its status

    a turn runs ─▶ every gateway_alive_s: white space before the JSON, or a comment in the event stream
                   so a read time-out that is shorter than the turn never strikes

Invariants
- No request ends the process: an unforeseen error is answered 500, and logged.
- A reply that has begun with signs of life cannot change its status any more. If the turn fails then, an event stream
  ends with the error as an event. Any other reply breaks the connection: an SDK asks again, and gets the status.
- A reply counts as heard once all of it has been written to a connection that was still open.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from typing import Any, Final

import msgspec
from aiohttp import web

from actors.core.context import Context
from actors.gateway.errors import HttpProblem
from actors.gateway.sessions import Answer, Pending
from actors.protocol.episodes import EpisodeName
from actors.protocol.session_keys import BadKey, SessionKeys

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
_RETRY_HEADER: Final = "x-stainless-retry-count"
"""Header in which OpenAI's SDKs count their retries."""
_DONE: Final = b"data: [DONE]\n\n"


class Http:
    """Does what all routes need: reads keys and bodies, answers problems, writes replies with signs of life."""

    def __init__(self, ctx: Context, keys: SessionKeys) -> None:
        self._ctx, self.keys = ctx, keys
        self._limits = ctx.limits
        self._requests = 0

    # ------------------------------------------------------------ what comes in

    @web.middleware
    async def guard(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Answer problems in OpenAI's form, and refuse more requests than there is room for."""
        if self._requests >= self._limits.gateway_requests:
            text = f"{self._requests} requests are being answered: come back later"
            return _problem(HttpProblem(503, "busy", text, retry_after_s=self._limits.gateway_busy_s))
        self._requests += 1
        try:
            return await handler(request)
        except HttpProblem as problem:
            return _problem(problem)
        except web.HTTPRequestEntityTooLarge:
            text = f"the request is larger than limits.gateway_request_bytes ({self._limits.gateway_request_bytes})"
            return _problem(HttpProblem(413, "too_large", text))
        except web.HTTPException as error:
            return _problem(
                HttpProblem(error.status, "no_such_route", f"{request.method} {request.path}: {error.reason}")
            )
        except (ConnectionError, TimeoutError):
            raise  # the agent has left, or does not read
        except Exception as error:
            self._ctx.log.exception("a request could not be answered", route=_route(request))
            return _problem(HttpProblem(500, "bug", f"the gateway failed on this request: {type(error).__name__}"))
        finally:
            self._requests -= 1

    async def body(self, request: web.Request) -> bytes:
        try:
            async with asyncio.timeout(self._limits.gateway_read_s):
                return await request.read()
        except TimeoutError as error:
            text = f"the body did not come within limits.gateway_read_s ({self._limits.gateway_read_s:g} s)"
            raise HttpProblem(400, "too_slow", text) from error
        except web.RequestPayloadError as error:
            text = f"the body cannot be read by its Content-Encoding or Transfer-Encoding ({error})"
            raise HttpProblem(400, "unreadable", text) from error

    def key(self, request: web.Request) -> str:
        """The key of a request, from its path or a header."""
        if named := request.match_info.get("key"):
            return named
        scheme, _, bearer = request.headers.get("Authorization", "").partition(" ")
        key = bearer.strip() if scheme.lower() == "bearer" else request.headers.get("x-api-key", "").strip()
        if not key:
            text = "no key: send it as Authorization: Bearer KEY, as x-api-key, or in the path as /s/KEY/v1/…"
            raise HttpProblem(401, "no_key", text)
        return key

    def episode(self, request: web.Request) -> EpisodeName:
        """The episode whose key the request has. Raises HttpProblem if it has no such key."""
        key = self.key(request)
        if self.keys.is_admin(key):
            text = "this is the admin key: begin an episode (POST /v1/episodes), and use the key that comes with it"
            raise HttpProblem(401, "not_a_session", text)
        try:
            return self.keys.read(key)
        except BadKey as error:
            raise HttpProblem(401, "invalid_key", str(error)) from error

    def has_admin_key(self, request: web.Request) -> bool:
        return self.keys.is_admin(self.key(request))

    def is_retry(self, request: web.Request) -> bool:
        count = request.headers.get(_RETRY_HEADER, "0")
        return count.isascii() and count.isdecimal() and int(count[:9]) > 0

    # ------------------------------------------------------------ what goes out

    async def reply(
        self,
        request: web.Request,
        pending: Pending,
        make: Callable[[Answer], Iterable[dict[str, Any]]],
        *,
        streams: bool,
        settle: Callable[[Pending], None],
    ) -> web.StreamResponse:
        """Write what ``make`` makes of the answer: one object, or the events of a stream."""
        response = web.StreamResponse(headers=_EVENTS if streams else _JSON)
        pending.listeners += 1
        try:
            try:
                answer = await self._until_answered(
                    request, response, pending, b": a turn runs\n\n" if streams else b" "
                )
            except HttpProblem as problem:
                if not response.prepared:
                    raise
                if not streams:
                    return self._broken(request, response)
                await self._write(response, _event(problem.body()))
            else:
                if not response.prepared:
                    await self._prepare(request, response)
                parts = make(answer)
                body = b"".join(map(_event, parts)) + _DONE if streams else b"".join(map(msgspec.json.encode, parts))
                await self._write(response, body)
                await self._end(response)
                pending.heard |= request.transport is not None and not request.transport.is_closing()
                return response
            await self._end(response)
            return response
        except (ConnectionError, TimeoutError):
            return self._broken(request, response)
        finally:
            pending.listeners -= 1
            settle(pending)

    async def _until_answered(
        self, request: web.Request, response: web.StreamResponse, pending: Pending, sign: bytes
    ) -> Answer:
        while True:
            try:
                async with asyncio.timeout(self._limits.gateway_alive_s):
                    return await asyncio.shield(pending.ended)
            except TimeoutError:
                if not response.prepared:
                    await self._prepare(request, response)
                await self._write(response, sign)

    async def _prepare(self, request: web.Request, response: web.StreamResponse) -> None:
        async with asyncio.timeout(self._limits.gateway_read_s):
            await response.prepare(request)

    async def _write(self, response: web.StreamResponse, data: bytes) -> None:
        async with asyncio.timeout(self._limits.gateway_read_s):
            await response.write(data)

    async def _end(self, response: web.StreamResponse) -> None:
        async with asyncio.timeout(self._limits.gateway_read_s):
            await response.write_eof()

    def _broken(self, request: web.Request, response: web.StreamResponse) -> web.StreamResponse:
        if request.transport is not None:
            request.transport.abort()
        return response


_JSON: Final = {"Content-Type": "application/json"}
_EVENTS: Final = {
    "Content-Type": "text/event-stream; charset=utf-8",
    "Cache-Control": "no-cache",
    "X-Accel-Buffering": "no",
}


def _route(request: web.Request) -> str:
    """The path pattern of the request's route: without the key, which must not be in a log."""
    resource = request.match_info.route.resource
    return "" if resource is None else resource.canonical


def as_json(value: object, status: int = 200) -> web.Response:
    return web.Response(body=msgspec.json.encode(value), status=status, headers=_JSON)


def _event(value: object) -> bytes:
    return b"data: " + msgspec.json.encode(value) + b"\n\n"


def _problem(problem: HttpProblem) -> web.Response:
    response = as_json(problem.body(), problem.status)
    if problem.retry_after_s is not None:
        response.headers["Retry-After"] = str(max(1, round(problem.retry_after_s)))
    return response
