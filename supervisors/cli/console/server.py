"""Serves the page of the console to browsers of this machine, and keeps open pages up to date.

    /?token=…          gives the browser its secret as a cookie, leads to the page
    /v/VIEW/           index.html, and beside it app.js, charts.js, …
    /v/VIEW/data       every section as JSON: a run that is over needs no more
    /v/VIEW/feed       the same as server-sent events, then what changes
    /v/VIEW/samples    ?step=N: samples of a step

Invariants
- It listens on loopback only, and answers GET only; nothing that comes in changes anything.
- Whoever has neither token nor cookie gets nothing of the run. Secrets are compared in constant time.
- At most ``console_clients`` connections are served, and as many told to wait; each read and each write has a deadline.
"""

from __future__ import annotations

import asyncio
import json
import secrets
from contextlib import suppress
from http import HTTPStatus
from importlib import resources
from typing import Any, Final

from configs.limits import Limits
from supervisors.cli.console.feed import Feed, Page
from supervisors.cli.console.http_text import BadRequest, Request, entrance, head_of, parse

PAGE: Final = {
    "index.html": "text/html; charset=utf-8",
    "style.css": "text/css; charset=utf-8",
    **{f"{name}.js": "text/javascript; charset=utf-8" for name in ("app", "charts", "lanes", "panels", "elements")},
}
_JSON: Final = "application/json"
_END: Final = b"\r\n\r\n"


class ConsoleServer:
    """Answers browsers. ``url`` is what a person opens; it holds the token."""

    def __init__(self, feed: Feed, limits: Limits) -> None:
        self._feed = feed
        self._limits = limits
        self._token = secrets.token_urlsafe(24)
        self._secret = secrets.token_urlsafe(24)
        self._view = secrets.token_urlsafe(9)
        self._server: asyncio.Server | None = None
        self._clients: set[asyncio.Task[Any]] = set()
        folder = resources.files("supervisors.cli.console") / "page"
        self._page = {name: (folder / name).read_bytes() for name in PAGE}

    async def start(self, host: str, port: int) -> None:
        """Begin to listen. Raises OSError: the address is taken or does not exist."""
        size = self._limits.console_request_bytes
        async with asyncio.timeout(self._limits.console_timeout_s):
            self._server = await asyncio.start_server(self._connected, host, port, limit=size)

    @property
    def url(self) -> str:
        assert self._server is not None, "it has been started"
        host, port, *_ = self._server.sockets[0].getsockname()
        return f"http://{f'[{host}]' if ':' in host else host}:{port}/?token={self._token}"

    async def stop(self) -> None:
        """Stop listening, and close all connections."""
        if self._server is not None:
            self._server.close()
        clients = list(self._clients)
        for client in clients:
            client.cancel()
        with suppress(TimeoutError):
            async with asyncio.timeout(self._limits.close_timeout_s):
                await asyncio.gather(*clients, return_exceptions=True)

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        others = len(self._clients)
        busy = others >= self._limits.console_clients
        self._clients.add(task)
        try:
            if others < 2 * self._limits.console_clients:  # further ones are closed without an answer
                with suppress(OSError, TimeoutError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
                    await self._answer(reader, writer, busy=busy)
        except asyncio.CancelledError:
            pass  # the console ends
        finally:
            self._clients.discard(task)
            writer.close()
            with suppress(OSError, TimeoutError, asyncio.CancelledError):
                async with asyncio.timeout(self._limits.close_timeout_s):
                    await writer.wait_closed()

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, busy: bool) -> None:
        try:
            async with asyncio.timeout(self._limits.console_timeout_s):
                request = parse((await reader.readuntil(_END)).removesuffix(_END))
            if busy:
                raise BadRequest(HTTPStatus.SERVICE_UNAVAILABLE, "too many pages are open: close one, and try again")
            if request.path == self._place("feed") and self._knows(request):
                await self._stream(writer)
            else:
                await self._send(writer, *self._reply(request))
        except BadRequest as error:
            await self._send(writer, error.status, "text/plain; charset=utf-8", error.why.encode(), {"Allow": "GET"})

    def _reply(self, request: Request) -> tuple[HTTPStatus, str, bytes, dict[str, str]]:
        """The answer to any request but for the feed.

        Raises:
            BadRequest: the request is refused.
        """
        if request.path == "/" and secrets.compare_digest(
            request.query.get("token", "").encode(), self._token.encode()
        ):
            page, headers = entrance(self._view, self._secret)
            return HTTPStatus.OK, PAGE["index.html"], page, headers
        if not self._knows(request):
            raise BadRequest(HTTPStatus.FORBIDDEN, "open the address that headrace console printed: it holds the token")
        name = request.path.removeprefix(self._place("")) or "index.html"
        if name in PAGE:
            return HTTPStatus.OK, PAGE[name], self._page[name], {}
        if name == "data":
            return HTTPStatus.OK, _JSON, encode(self._feed.snapshot()), {}
        if name == "samples":
            step = request.query.get("step", "")
            if not (step.isascii() and step.isdigit() and len(step) < 12):
                raise BadRequest(HTTPStatus.BAD_REQUEST, f"step={step[:20]!r}: expected a step's number")
            return HTTPStatus.OK, _JSON, encode(self._feed.samples_of(int(step))), {}
        raise BadRequest(HTTPStatus.NOT_FOUND, "there is no such page")

    def _place(self, name: str) -> str:
        return f"/v/{self._view}/{name}"

    def _knows(self, request: Request) -> bool:
        """Whether the browser has the secret, and asks for a path of the console's."""
        known = secrets.compare_digest(request.cookie.encode(), self._secret.encode())
        return known and request.path.startswith(self._place(""))

    async def _send(
        self, writer: asyncio.StreamWriter, status: HTTPStatus, kind: str, body: bytes, headers: dict[str, str]
    ) -> None:
        await self._write(writer, head_of(status, kind, len(body), headers) + body)

    async def _stream(self, writer: asyncio.StreamWriter) -> None:
        """Every section, then what changes, until the page is closed or too far behind."""
        await self._write(writer, head_of(HTTPStatus.OK, "text/event-stream", None))
        with self._feed.open_page() as page:
            for section, data in self._feed.snapshot().items():
                await self._write(writer, _update(section, data))
            while not page.behind:
                await self._write(writer, await self._next(page))

    async def _next(self, page: Page) -> bytes:
        try:
            async with asyncio.timeout(self._limits.console_alive_s):
                return _update(*await page.updates.get())
        except TimeoutError:
            return _update("alive", None)

    async def _write(self, writer: asyncio.StreamWriter, data: bytes) -> None:
        writer.write(data)
        async with asyncio.timeout(self._limits.console_timeout_s):
            await writer.drain()


def encode(data: Any) -> bytes:
    return json.dumps(data, separators=(",", ":"), allow_nan=False, default=str).encode()


def _update(section: str, data: Any) -> bytes:
    return b"event: " + section.encode() + b"\ndata: " + encode(data) + b"\n\n"
