"""A bad way to the server, and a server that dies: what ``headrace bench serve --faults`` strikes with.

    client ─▶ Proxy ─┬─▶ server ─▶ the answer: passed on, dropped, or turned into 500
                     └─▶ counts the answers of operations: after some, drawn by a seed, the server is killed

Invariants
- Whatever becomes of its answer, the server has had the request.
- While the server is away requests wait here: the client sees a pause, and 503 after a while.
"""

from __future__ import annotations

import asyncio
import random
import threading
from collections import Counter
from collections.abc import Callable, Collection
from typing import Final, Self

from aiohttp import ClientError, ClientSession, ClientTimeout, web

DROPPED, FAILED = 0.2, 0.1
"""Parts of the answers that are lost on their way, and that become 500."""
_PATIENCE_S: Final = 40.0
_PASSED: Final = ("X-API-Key", "Content-Type", "Accept")
_SPARED: Final = ("client/config", "client/dynamic_config", "create_session", "session_heartbeat", "telemetry")
"""Routes whose answers arrive: none of them is an operation."""


class Proxy:
    """Stands between clients and a server, on a thread of its own."""

    def __init__(self, seed: int) -> None:
        self._draw = random.Random(f"proxy {seed}")
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="proxy")
        self._is_up = asyncio.Event()
        self._upstream = ""
        self._answered = set[str]()
        self._strikes = set[int]()
        self._strike: Callable[[], None] = lambda: None
        self.counts = Counter[str]()
        self.url = ""

    def __enter__(self) -> Self:
        self._thread.start()
        asyncio.run_coroutine_threadsafe(self._begin(), self._loop).result(_PATIENCE_S)
        return self

    def __exit__(self, *_: object) -> None:
        asyncio.run_coroutine_threadsafe(self._end(), self._loop).result(_PATIENCE_S)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(_PATIENCE_S)
        self._loop.close()

    def send_to(self, url: str) -> None:
        """Let requests through to the server at ``url``; empty: let them wait."""
        self._upstream = url
        self._loop.call_soon_threadsafe(self._is_up.set if url else self._is_up.clear)

    def strike_after(self, answers: Collection[int], strike: Callable[[], None]) -> None:
        """Call ``strike`` on the proxy's thread when so many operations have their answers; it must not block."""
        self._strikes, self._strike = set(answers), strike

    async def _begin(self) -> None:
        self._session = ClientSession(timeout=ClientTimeout(total=_PATIENCE_S))
        app = web.Application(client_max_size=1 << 30)
        app.router.add_route("*", "/{path:.*}", self._pass)
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.0)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", 0).start()
        self.url = f"http://127.0.0.1:{self._runner.addresses[0][1]}"

    async def _end(self) -> None:
        await self._runner.cleanup()
        await self._session.close()

    async def _pass(self, request: web.Request) -> web.StreamResponse:
        body = await request.read()
        headers = {name: request.headers[name] for name in _PASSED if name in request.headers}
        try:
            async with asyncio.timeout(_PATIENCE_S):
                await self._is_up.wait()
                async with self._session.request(
                    request.method, self._upstream + request.path_qs, data=body, headers=headers
                ) as answer:
                    content, kind = await answer.read(), answer.content_type
        except (ClientError, OSError, TimeoutError):
            self.counts["cut off"] += 1
            return web.json_response({"error": "the server is away"}, status=503)
        route = request.path.partition("/api/v1/")[2]
        if route == "retrieve_future" and answer.status == 200 and b"complete_metadata" not in content[:200]:
            self._count(body.decode())
        return self._fate(request, route) or web.Response(body=content, status=answer.status, content_type=kind)

    def _count(self, asked: str) -> None:
        """Note that an operation has its answer."""
        before = len(self._answered)
        self._answered.add(asked.partition('"request_id"')[2].partition(",")[0])
        if len(self._answered) > before and len(self._answered) in self._strikes:
            self._is_up.clear()
            self._strike()

    def _fate(self, request: web.Request, route: str) -> web.Response | None:
        """What becomes of an answer other than that it arrives."""
        drawn = self._draw.random()
        if route in _SPARED or request.method != "POST" or drawn >= DROPPED + FAILED:
            return None
        self.counts["dropped" if drawn < DROPPED else "turned into 500"] += 1
        if drawn < DROPPED and request.transport is not None:
            request.transport.abort()
        return web.json_response({"error": "told to fail"}, status=500, headers={"retry-after-ms": "5"})
