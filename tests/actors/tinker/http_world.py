"""A Tinker server at a local port over the fakes, whose answers can be dropped and which can be started again."""

from __future__ import annotations

import random
import ssl
from pathlib import Path
from typing import Self

from aiohttp import ClientSession, web

from actors.tinker.server import TinkerServer
from configs.limits import DEFAULT_LIMITS, Limits
from configs.tenants import TenantsConfig
from tests.actors.tinker.tinker_world import FakeFactory, FakeSampler, Faults, served

LIMITS = DEFAULT_LIMITS.model_copy(update={"tinker_replay_operations": 7, "tinker_poll_s": 2.0})
REPEATED = {"create_model", "forward_backward", "optim_step", "save_weights", "save_weights_for_sampler", "asample"}


class HttpWorld:
    """Serves one directory in several lives, all at one port."""

    def __init__(
        self, directory: Path, limits: Limits = LIMITS, tenants: TenantsConfig | None = None,
        tls: ssl.SSLContext | None = None,
    ) -> None:  # fmt: skip
        self._directory, self._limits, self._tenants, self._tls = directory, limits, tenants, tls
        self._port = 0
        self._runner: web.AppRunner | None = None
        self.faults, self.sampler_faults = Faults(), Faults()
        self.drawn: random.Random | None = None
        """Draws which answers are dropped, and which become 500; None: none of them."""
        self.disturbed = 0

    async def __aenter__(self) -> Self:
        await self.begin()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.end()

    async def begin(self) -> None:
        self.server = TinkerServer(
            self._directory, served(FakeSampler(self.sampler_faults)), FakeFactory(self.faults), self._limits,
            self._tenants,
        )  # fmt: skip
        self.server.app.middlewares.insert(0, self._disturb)
        await self.server.open()
        self._runner = self.server.runner(shutdown_timeout=0.0)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", self._port, reuse_address=True, ssl_context=self._tls)
        await site.start()
        self._port = self._runner.addresses[0][1]

    async def end(self) -> None:
        assert self._runner is not None
        await self._runner.cleanup()
        await self.server.close()

    async def restart(self) -> None:
        await self.end()
        await self.begin()

    @property
    def url(self) -> str:
        return f"{'https' if self._tls else 'http'}://127.0.0.1:{self._port}"

    def key(self, tenant: str = "alice") -> str:
        return self.server.keys.sign(tenant)

    def client(self, tenant: str = "alice") -> ClientSession:
        return ClientSession(f"{self.url}/api/v1/", headers={"X-API-Key": self.key(tenant)})

    @web.middleware
    async def _disturb(self, request: web.Request, handler) -> web.StreamResponse:
        response = await handler(request)
        if self.drawn is None or request.path.rpartition("/")[2] not in REPEATED:
            return response
        fate = self.drawn.random()
        if fate < 0.2 and request.transport is not None:
            self.disturbed += 1
            request.transport.abort()
        elif fate < 0.3:
            self.disturbed += 1
            return web.json_response({"error": "told to fail"}, status=500, headers={"retry-after-ms": "5"})
        return response
