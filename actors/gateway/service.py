"""The gateway, at which agents reach the model: an HTTP server over the ledger, in a process of its own.

    agent ──HTTP, session key──▶ http.py ─▶ openai_http.py ─▶ sessions.py ─▶ walk.py: what does it mean?
                                    └─────▶ episodes_http.py       └──TakeTurn, CutTurn, GetEpisode──▶ scheduler

    RUN/gateway.key        the admin key, mode 0600 (actors/protocol/session_keys.py)
    RUN/gateway.endpoint   the base URL of the present life

Invariants
- The gateway owns no state: killed and started again, it answers repeated questions from the ledger. Its sockets
  outlive it (``listening.py``): agents find the next life at the same address, and never anybody else.
- At another address than before, episodes are ended first: their agents may be talking to somebody else.
- Beyond the loopback interface the gateway speaks TLS, or does not start.
"""

from __future__ import annotations

import ssl
from pathlib import Path
from typing import Any

import msgspec
from aiohttp import web

from actors.core.actor import Actor
from actors.core.registered import RegisteredActor
from actors.environments.prompts.tokenizer import load_tokenizer
from actors.gateway.episodes_http import EpisodeRoutes
from actors.gateway.http import Handler, Http
from actors.gateway.listening import Listeners, inherited, open_listeners
from actors.gateway.off_loop import OffLoop
from actors.gateway.openai_http import OpenAiRoutes
from actors.gateway.openai_json import ReplyMaker
from actors.gateway.rendering import ChatTemplate
from actors.gateway.replies import ReplyReader
from actors.gateway.sessions import Sessions
from actors.gateway.walk import Walk
from actors.host.https import server_tls, server_url
from actors.host.import_guard import import_transformers_without_torch
from actors.host.whole_file import write_whole
from actors.jobs.stop_tokens import stop_token_ids
from actors.protocol.failures import Acknowledged
from actors.protocol.job_news import Trouble
from actors.protocol.services import RegisterService
from actors.protocol.session_keys import SessionKeys, admin_key
from actors.protocol.work_track import WorkTrack
from actors.roles import RoleArgs
from configs.checks.environment_checks import why_not_listen
from configs.episode_schema import GatewayConfig
from configs.model_files import positions, text_config
from configs.run_files import GATEWAY_ENDPOINT
from transport.errors import HeadraceError


class CannotListen(HeadraceError):
    """Configuration: the gateway cannot or must not listen at the job's address; the message says what to do."""

    permanent = True


class Gateway(RegisteredActor):
    """Serves the agents of one job over HTTP."""

    def __init__(self, args: RoleArgs) -> None:
        self._args = args
        self._job = args.job_config
        self._runner: web.AppRunner | None = None
        self._off_loop: OffLoop | None = None
        self._troubles: dict[str, int] = {}
        self._service: RegisterService | None = None
        self.base_url = ""
        """URL for agents, as OpenAI's SDKs want it: with ``/v1``."""

    async def on_start(self) -> None:
        job, model, run_dir = self._job, Path(self._args.model_path), Path(self._args.run_dir)
        tls = tls_context(job.gateway)
        tokenizer = await self.ctx.run_blocking(self._load_tokenizer, model)
        keys = SessionKeys(admin_key(run_dir), job.name)

        kept, most = self.ctx.limits.gateway_renderings, self.ctx.limits.gateway_rendered_tokens
        reader = ReplyReader(tokenizer, stop_token_ids(model, job.rollout.stop), kept, most)
        limit = positions(model)
        longest = limit.count if limit is not None else job.episode_tokens
        template = ChatTemplate(tokenizer, job.data.chat_template_kwargs, kept, most, longest)
        template.encode("")  # a fast tokenizer is set up by its first call, and by threads used as it is
        off_loop = self._off_loop = OffLoop(self.ctx.limits)
        walk = Walk(template, reader)
        sessions = Sessions(self.ctx, off_loop, job, walk, reader, longest, lambda: self.scheduler, self.tell)
        rows = text_config(model).get("vocab_size")
        replies = ReplyMaker(job.name, reader, rows if isinstance(rows, int) else len(tokenizer))
        track = WorkTrack(
            job.name, "gateway", "answer", lambda: self.ctx.ref(self.scheduler.beside(self._args.metrics))
        )
        http = Http(self.ctx, keys)
        app = web.Application(
            middlewares=[_on(track), http.guard], client_max_size=self.ctx.limits.gateway_request_bytes
        )
        OpenAiRoutes(http, off_loop, sessions, template, replies, job, self.tell).add_to(app)
        EpisodeRoutes(self.ctx, http, off_loop, job, lambda: self.scheduler, lambda: self.base_url).add_to(app)
        listeners = inherited() or self._opened(run_dir)
        self._service = RegisterService(job=job.name, role="gateway", address=self.ctx.self_address)
        offer = msgspec.structs.replace(self._service, moved=listeners.moved)
        await self.keep_registered(self._args.scheduler, offer, Acknowledged)
        await self._listen(app, tls, listeners, run_dir)
        track.start(self.ctx)

    async def registered(self) -> None:
        assert self._service is not None, "it was made before the first registration"
        self._introduction = self._service  # what has moved is told once

    def _load_tokenizer(self, model: Path) -> Any:
        import_transformers_without_torch()
        return load_tokenizer(model)

    def _opened(self, run_dir: Path) -> Listeners:
        """Sockets of our own, where nobody holds any for us."""
        host, port = self._job.gateway.host, self._job.gateway.port
        try:
            return open_listeners(self._job.gateway, run_dir)
        except OSError as error:
            fix = "free it, or set gateway.host and gateway.port to an address of this machine"
            raise CannotListen(f"gateway: {host}:{port or 0} cannot be listened at ({error}): {fix}") from error

    async def _listen(
        self, app: web.Application, tls: ssl.SSLContext | None, listeners: Listeners, run_dir: Path
    ) -> None:
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.0)
        await self._runner.setup()
        for one in listeners.sockets:
            await web.SockSite(self._runner, one, ssl_context=tls).start()
        own = server_url(tls, self._job.gateway.host, listeners.port)
        self.base_url = self._job.gateway.public_url or f"{own}/v1"
        write_whole(run_dir / GATEWAY_ENDPOINT, self.base_url + "\n")
        self.ctx.log.info("the gateway listens", url=self.base_url)

    async def on_stop(self) -> None:
        if self._runner is not None:
            await self._runner.cleanup()
        if self._off_loop is not None:
            self._off_loop.close()

    def tell(self, kind: str, text: str) -> None:
        """Report a trouble to people: the first time, and whenever its count has doubled."""
        count = self._troubles[kind] = self._troubles.get(kind, 0) + 1
        if count & (count - 1) == 0:
            trouble = Trouble(job=self._job.name, kind=kind, text=text, count=max(1, count // 2))
            self.ctx.ref(self.scheduler.address).tell(trouble)


def _on(track: WorkTrack) -> Any:
    """A middleware that records on ``track`` while requests are answered."""

    @web.middleware
    async def recorded(request: web.Request, handler: Handler) -> web.StreamResponse:
        with track.work():
            return await handler(request)

    return recorded


def tls_context(gateway: GatewayConfig) -> ssl.SSLContext | None:
    """The TLS context to listen with; None without TLS.

    Raises:
        CannotListen: the address is not the loopback interface's, and there is no TLS; or TLS files cannot be used.
    """
    for field, wrong, fix in why_not_listen(gateway):
        raise CannotListen(f"{field}: {wrong}. {fix}")
    try:
        return server_tls(gateway.tls_certificate, gateway.tls_key)
    except OSError as error:
        raise CannotListen(f"gateway.tls_certificate and gateway.tls_key: {error}") from error


def build(args: RoleArgs) -> dict[str, Actor]:
    return {args.name: Gateway(args)}
