"""A Tinker server at a local port that computes in the test's own process."""

from __future__ import annotations

import gc
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

from aiohttp import web

from actors.tinker.server import TinkerServer
from configs.limits import DEFAULT_LIMITS
from supervisors.serving.in_process import computed_here


@asynccontextmanager
async def served_here(models: Mapping[str, Path], directory: Path) -> AsyncIterator[dict[str, str]]:
    """The variables by which the client finds it."""
    async with AsyncExitStack() as closing:
        served, factory = await computed_here(models, closing, DEFAULT_LIMITS)
        server = TinkerServer(directory, served, factory)
        await server.open()
        runner = web.AppRunner(server.app, access_log=None, shutdown_timeout=0.0)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        try:
            yield {
                "TINKER_BASE_URL": f"http://127.0.0.1:{runner.addresses[0][1]}",
                "TINKER_API_KEY": server.keys.sign("alice"),
            }
        finally:
            await runner.cleanup()
            await server.close()
            gc.collect()  # sockets that the client leaves open are told of here, and not in another test
