"""The process that serves models to programs of other people: the Tinker API over training services and samplers.

    clients ─HTTP─▶ TinkerServer ─┬─▶ BackendFactory ─▶ ServiceBackend ──▶ training service       beside the jobs there
                                  ├─▶ EngineSampler ─▶ SamplerFleet ─────▶ samplers
                                  ├─▶ operation log, states, snapshots     all that outlives a process
                                  └─▶ events.jsonl, gauges for Prometheus  what tenants use

Invariants
- Where training services and samplers are is asked of the head, again whenever one of them is lost. A lost one costs
  its operations a pause: a model is made again from its last saved state and the log, and samples are drawn again.
- The log is the only state. This process ends when it cannot be written, and its next life goes on with it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from pathlib import Path

from aiohttp import web

from actors.core.actor import Actor, handles
from actors.core.watch import Down
from actors.host.https import server_tls, server_url
from actors.metrics.sinks.prometheus_port import GaugePort
from actors.protocol.metrics import Event
from actors.protocol.serving import Listens, QueryServing, ServingState
from actors.roles import ServingArgs
from actors.serving.fleet import SamplerFleet
from actors.serving.learners import BackendFactory
from actors.serving.places import Places
from actors.serving.samplers import EngineSampler
from actors.tinker.errors import LogFailed
from actors.tinker.server import TinkerServer
from actors.tinker.service import ServedModel
from actors.trainer.backends.service_backend import ServiceBackend, ServiceClient
from configs.names import SERVING, sampler_name, served_model
from configs.serving import ServedBase, served_base


class ModelServer(Actor):
    """Listens for clients, and has a place for each of their models on a training service."""

    def __init__(self, args: ServingArgs) -> None:
        self._args = args
        self._config = args.config
        self._service = args.service_config
        self._made = 0
        self._gauges: GaugePort | None = None

    async def on_start(self) -> None:
        ctx, config = self.ctx, self._config
        self._places = Places(ctx, self._args.head)
        self._places.follow()
        bases = {model.name: await ctx.run_blocking(served_base, model) for model in config.models}
        factory = BackendFactory(bases, self._backend, ctx.limits, device="auto", threads=0)
        self._server = await ctx.run_blocking(
            TinkerServer,
            Path(self._args.run_dir),
            self._served(bases),
            factory,
            ctx.limits,
            config.quotas,
            self._record,
        )
        await self._server.open()
        await self._listen()
        if config.prometheus_port is not None:
            await self._open_gauges(config.prometheus_port)
        ctx.start_task(self._end_with_the_log(), "the log fails")

    def _served(self, bases: Mapping[str, ServedBase]) -> list[ServedModel]:
        limit_s = self.ctx.limits.tinker_operation_s
        served: list[ServedModel] = []
        for index, (name, base) in enumerate(bases.items()):
            names = [sampler_name(index, number) for number in range(self._config.samplers)]
            sampler = EngineSampler(SamplerFleet(self.ctx, self._places, names, limit_s).sample)
            served.append(ServedModel(name, str(base.path), base.vocabulary, base.context_tokens, sampler))
        return served

    async def _listen(self) -> None:
        config, limits = self._config, self.ctx.limits
        self._runner = self._server.runner()
        async with asyncio.timeout(limits.ready_timeout_s):
            await self._runner.setup()
            tls = server_tls(config.tls_certificate, config.tls_key)
            await web.TCPSite(self._runner, config.host, config.port, ssl_context=tls).start()
        url = server_url(tls, config.host, self._runner.addresses[0][1])
        self.ctx.ref(self._args.head).tell(Listens(url=url))

    def _record(self, name: str, fields: dict[str, float | int | str]) -> None:
        self.ctx.ref(self._places.beside(self._args.metrics)).tell(Event(job=SERVING, name=name, fields=fields))

    async def _open_gauges(self, port: int) -> None:
        try:
            self._gauges = await self.ctx.run_blocking(GaugePort, port, self.ctx.limits)
        except OSError as error:  # nobody's work waits for it
            self.ctx.log.error("prometheus_port cannot be opened: there are no gauges", port=port, error=str(error))
            return
        self.ctx.start_task(self._show(self._gauges), "show gauges")

    async def _show(self, gauges: GaugePort) -> None:
        """Set the gauges now and then; a tenant that has nothing any more is shown with zeros."""
        shown: dict[str, dict[str, float]] = {}
        while True:
            before = {tenant: dict.fromkeys(use, 0.0) for tenant, use in shown.items()}
            shown = before | await self._server.service.uses()
            for tenant, use in shown.items():
                for name, value in use.items():
                    gauges.set(f"headrace_serving_{name}", f"{name} of a tenant", value, tenant=tenant)
            refused = self._server.service.events.keys_refused
            gauges.set("headrace_serving_keys_refused", "requests with a bad key since the server started", refused)
            await self.ctx.sleep(self.ctx.limits.tinker_look_s)

    async def _end_with_the_log(self) -> None:
        """Raises LogFailed, once the log cannot be written."""
        await self._server.failed.wait()
        raise LogFailed(f"{self._args.run_dir}: the operation log cannot be written; mend that, it is tried again")

    async def on_stop(self) -> None:
        await self._runner.cleanup()
        await self._server.close()
        if self._gauges is not None:
            await self.ctx.run_blocking(self._gauges.close)

    async def _backend(self, number: int) -> ServiceBackend:
        """The backend of a model: a place on the training service, which knows each making of it as another run."""
        address = await self._places.find(self._service.name)
        self._made += 1
        client = ServiceClient(
            job=served_model(number),
            run=f"{self.ctx.self_address.peer.incarnation}.{self._made}",
            backend=self._service.backend,
            ranks=self._service.ranks,
        )
        backend = ServiceBackend(client, address)
        backend.connect(self.ctx)
        return backend

    @handles(Down)
    async def somebody_is_gone(self, message: Down) -> None:
        """Look for whoever it was at the next call, for the head now. A service's models notice by themselves."""
        self._places.heard(message)

    @handles(QueryServing)
    async def state(self, message: QueryServing) -> ServingState:
        return ServingState(rows=self._server.service.rows())


def build(args: ServingArgs) -> dict[str, Actor]:
    return {args.name: ModelServer(args)}
