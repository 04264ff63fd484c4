"""A Tinker server in one process whose idle models go to rest at once, for measurements of those: no option says when
they do.
"""

from __future__ import annotations

import argparse
import asyncio
import signal
from contextlib import AsyncExitStack
from pathlib import Path

from aiohttp import web

from actors.tinker.server import TinkerServer
from configs.limits import DEFAULT_LIMITS
from supervisors.serving.in_process import computed_here

IDLE_S = 2.0


async def _serve(model: str, directory: Path, listen: str, tenants: list[str]) -> None:
    limits = DEFAULT_LIMITS.model_copy(update={"tinker_idle_s": IDLE_S})
    stopped = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stopped.set)
    name, _, path = model.partition("=")
    host, _, port = listen.partition(":")
    async with AsyncExitStack() as closing:
        served, factory = await computed_here({name: path}, closing, limits)
        server = TinkerServer(directory, served, factory, limits)
        closing.push_async_callback(server.close)
        await server.open()
        runner = server.runner()
        closing.push_async_callback(runner.cleanup)
        await runner.setup()
        await web.TCPSite(runner, host, int(port)).start()
        print(f"address TINKER_BASE_URL=http://{listen}", flush=True)
        for tenant in tenants:
            print(f"key TINKER_API_KEY={server.keys.sign(tenant)} for {tenant}", flush=True)
        await stopped.wait()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--model")
    parser.add_argument("--dir", type=Path)
    parser.add_argument("--listen")
    parser.add_argument("--tenant", action="append")
    options = parser.parse_args()
    asyncio.run(_serve(options.model, options.dir, options.listen, options.tenant))
