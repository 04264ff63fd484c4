"""The gateway: where agents reach the model. An HTTP server over the ledger, in a process of its own.

    agent ──HTTP, session key──▶ http.py ─▶ openai_http.py ─▶ sessions.py ─▶ walk.py: what does it mean?
                                    └─────▶ episodes_http.py       └──TakeTurn, CutTurn, GetEpisode──▶ scheduler

    RUN/gateway.key        the admin key, mode 0600 (actors/protocol/session_keys.py)
    RUN/gateway.endpoint   the base URL of the present life

Invariants
- It owns nothing: killed and started again it answers what is asked again from the ledger. A port that is chosen once
  is kept, so that agents find its next life where they found this one.
- Beyond the loopback interface it speaks TLS, or does not start.
"""

from __future__ import annotations

import ssl
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit

from aiohttp import web

from actors.core.actor import Actor
from actors.core.registered import RegisteredActor
from actors.environments.prompts.tokenizer import load_tokenizer
from actors.gateway.episodes_http import EpisodeRoutes
from actors.gateway.http import Http
from actors.gateway.openai_http import OpenAiRoutes
from actors.gateway.openai_json import ReplyMaker
from actors.gateway.rendering import ChatTemplate
from actors.gateway.replies import ReplyReader
from actors.gateway.sessions import Sessions
from actors.gateway.walk import Walk
from actors.host.import_guard import import_transformers_without_torch
from actors.jobs.stop_tokens import stop_token_ids
from actors.protocol.failures import Acknowledged
from actors.protocol.job_news import Trouble
from actors.protocol.services import RegisterService
from actors.protocol.session_keys import SessionKeys, admin_key
from actors.roles import RoleArgs
from configs.checks.gateway_checks import why_not_listen
from configs.episode_schema import GatewayConfig
from configs.model_files import positions, text_config
from transport.errors import HeadraceError
from transport.own_address import own_address

ENDPOINT_FILE: Final = "gateway.endpoint"


class CannotListen(HeadraceError):
    """Configuration: the address that the job names cannot be listened at, or must not; the message says what to do."""

    permanent = True


class Gateway(RegisteredActor):
    """It answers agents for one job."""

    def __init__(self, args: RoleArgs) -> None:
        self._args = args
        self._job = args.job_config
        self._runner: web.AppRunner | None = None
        self._troubles: dict[str, int] = {}
        self.base_url = ""
        """How agents reach it: the URL that OpenAI's SDKs want, with ``/v1``."""

    async def on_start(self) -> None:
        job, model, run_dir = self._job, Path(self._args.model_path), Path(self._args.run_dir)
        tls = tls_context(job.gateway)
        tokenizer = await self.ctx.run_blocking(self._load_tokenizer, model)
        keys = SessionKeys(admin_key(run_dir), job.name)
        service = RegisterService(job=job.name, role="gateway", address=self.ctx.self_address)

        kept, most = self.ctx.limits.gateway_renderings, self.ctx.limits.gateway_rendered_tokens
        reader = ReplyReader(tokenizer, stop_token_ids(model, job.rollout.stop), kept, most)
        template = ChatTemplate(tokenizer, job.data.chat_template_kwargs, kept, most)
        limit = positions(model)
        longest = limit.count if limit is not None else job.episode_tokens
        sessions = Sessions(self.ctx, job, Walk(template, reader), reader, longest, self.tell)
        rows = text_config(model).get("vocab_size")
        replies = ReplyMaker(job.name, reader, rows if isinstance(rows, int) else len(tokenizer))
        http = Http(self.ctx, keys)
        app = web.Application(middlewares=[http.guard], client_max_size=self.ctx.limits.gateway_request_bytes)
        OpenAiRoutes(http, sessions, template, replies, job, lambda: self.hub, self.tell).add_to(app)
        EpisodeRoutes(self.ctx, http, job, lambda: self.hub, lambda: self.base_url).add_to(app)
        await self._listen(app, tls, run_dir)
        await self.keep_registered(self._args.scheduler, service, Acknowledged)

    def _load_tokenizer(self, model: Path) -> Any:
        import_transformers_without_torch()
        return load_tokenizer(model)

    async def _listen(self, app: web.Application, tls: ssl.SSLContext | None, run_dir: Path) -> None:
        host, file = self._job.gateway.host, run_dir / ENDPOINT_FILE
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.0)
        await self._runner.setup()
        wanted = [self._job.gateway.port] if self._job.gateway.port else [_port_before(file), 0]
        for port in wanted:
            try:
                site = web.TCPSite(self._runner, host, port or 0, ssl_context=tls)
                await site.start()
                break
            except OSError as error:
                if port == wanted[-1]:
                    fix = "free it, or set gateway.host and gateway.port to an address of this machine"
                    raise CannotListen(f"gateway: {host}:{port} cannot be listened at ({error}): {fix}") from error
        found = self._runner.addresses[0][1]
        shown = _shown(host)
        self.base_url = self._job.gateway.public_url or f"{'https' if tls else 'http'}://{shown}:{found}/v1"
        fresh = file.with_name(f".{file.name}")
        fresh.write_text(self.base_url + "\n")
        fresh.replace(file)
        self.ctx.log.info("the gateway listens", url=self.base_url)

    async def on_stop(self) -> None:
        if self._runner is not None:
            await self._runner.cleanup()

    def tell(self, kind: str, text: str) -> None:
        """Say a trouble to people: the first time, and whenever its count has doubled."""
        count = self._troubles[kind] = self._troubles.get(kind, 0) + 1
        if count & (count - 1) == 0:
            trouble = Trouble(job=self._job.name, kind=kind, text=text, count=max(1, count // 2))
            self.ctx.ref(self.hub.address).tell(trouble)


def tls_context(gateway: GatewayConfig) -> ssl.SSLContext | None:
    """What to listen with; None: without TLS.

    Raises:
        CannotListen: the address is not the loopback interface's, and there is no TLS; or its files cannot be used.
    """
    for field, wrong, fix in why_not_listen(gateway):
        raise CannotListen(f"{field}: {wrong}. {fix}")
    if gateway.tls_certificate is None or gateway.tls_key is None:
        return None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    certificate, key = (Path(file).expanduser() for file in (gateway.tls_certificate, gateway.tls_key))
    try:
        context.load_cert_chain(certificate, key)
    except (OSError, ssl.SSLError) as error:
        raise CannotListen(f"gateway.tls_certificate {certificate}, gateway.tls_key {key}: {error}") from error
    return context


def _shown(host: str) -> str:
    """``host`` as a part of a URL, for others too: a listener at all interfaces is at none of that name."""
    if host in ("0.0.0.0", "::"):  # noqa: S104 (compared, not listened at)
        return own_address(also_v6=host == "::")
    return f"[{host}]" if ":" in host else host


def _port_before(file: Path) -> int:
    """The port of an earlier life; 0: there was none. Behind a public URL it is not known."""
    try:
        return urlsplit(file.read_text().strip()).port or 0
    except (OSError, ValueError):
        return 0


def build(args: RoleArgs) -> dict[str, Actor]:
    """The gateway's process hosts one actor."""
    return {args.name: Gateway(args)}
