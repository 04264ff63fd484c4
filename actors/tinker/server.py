"""The Tinker server as one thing: a directory, base models, what trains them, and an aiohttp application.

    server = TinkerServer(directory, [ServedModel("Qwen/Qwen3-8B", …, sampler)], factory)
    await server.open()                       # goes on with what former lives have left
    key = server.keys.sign("alice")           # TINKER_API_KEY of a tenant
    runner = server.runner()                  # whoever listens decides where, and with which certificate
    …
    await server.close()                      # nothing is lost: the next life goes on

``server.failed`` is set when the log cannot be written any more; close the server then.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from aiohttp import web

from actors.tinker.accounts import Record
from actors.tinker.keys import TenantKeys
from actors.tinker.learner import LearnerFactory
from actors.tinker.routes import Routes
from actors.tinker.service import ServedModel, TinkerService
from configs.limits import DEFAULT_LIMITS, Limits
from configs.tenants import TenantsConfig


class TinkerServer:
    """Serves the Tinker API from one directory, in one process at a time."""

    def __init__(
        self, directory: Path, served: Sequence[ServedModel], factory: LearnerFactory, limits: Limits = DEFAULT_LIMITS,
        tenants: TenantsConfig | None = None, record: Record = lambda *_: None,
    ) -> None:  # fmt: skip
        """Make the directory, or open it. Blocks. ``record`` takes events.

        Raises:
            LogUnreadable: its log is damaged, or of another version.
            OSError: it cannot be written.
        """
        directory.mkdir(parents=True, exist_ok=True)
        self.keys = TenantKeys.of_directory(directory)
        self.service = TinkerService(directory, served, factory, limits, tenants=tenants, record=record)
        self._limits = limits
        self._routes = Routes(self.service, self.keys)
        self.app: web.Application = self._routes.app()

    def runner(self, **options: Any) -> web.AppRunner:
        """What serves connections; one on which no head of a request comes for ``limits.tinker_read_s`` is closed."""
        return web.AppRunner(self.app, access_log=None, keepalive_timeout=self._limits.tinker_read_s, **options)

    @property
    def failed(self) -> asyncio.Event:
        return self.service.failed

    async def open(self) -> None:
        await self.service.open()

    async def close(self) -> None:
        self._routes.close()
        await self.service.close()
