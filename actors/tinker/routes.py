"""The HTTP side of the Tinker server: every route that the client's training and sampling path asks.

    request ─▶ room for one more? ─▶ whose key? ─▶ body, bounded ─▶ route ─▶ service.py ─▶ {request_id}
    retrieve_future ─▶ waits ─▶ the answer │ 408 try_again, and the client asks again │ {error, category}

Invariants
- No request ends the process: an unforeseen error is answered 500, which the client repeats, and logged.
- Never 409 for "no": the client repeats that. A refused operation is a failed future; a request that names no model
  and number, or somebody else's, is a 4xx. 429 means "later", with room made by waiting alone.
- The loop computes nothing whose time grows with a request: bodies are read on threads, one for each tenant at a time.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from typing import Any, Final, TypeVar
from weakref import WeakValueDictionary

import msgspec
import structlog
from aiohttp import web
from tinker import types

from actors.tinker import operations as op
from actors.tinker import wire
from actors.tinker.errors import OperationRefused, Problem
from actors.tinker.keys import TenantKeys
from actors.tinker.model_line import ModelLine
from actors.tinker.operation_log import Spent
from actors.tinker.service import Pending, ServedModel, TinkerService
from configs.tenants import OPERATOR

R = TypeVar("R")
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

_PREFIX: Final = "/api/v1/"
_FLAGS: Final = {
    "pjwt_auth_enabled": False, "proto_compress_fwdbwd": False, "parallel_fwdbwd_chunks": True,
    "use_pyqwest_transport": False, "sample_use_retrieve_futures": False, "custom_loss_server_side": False,
    "sample_join_sampling_session": False,
}  # fmt: skip
"""What the client may use of this server.

``sample_use_retrieve_futures`` would have one poll for all samples of a client in place of one each, which are cheap
here. The order in which samples end would have to be kept for it, from one life of the server to the next, and a poll
that is refused once fails all samples of that client: so a client polls for each.
"""
_TENANT: Final = web.RequestKey("tenant", str)


class _Named(msgspec.Struct):
    """Says which operation of which model a body in JSON is."""

    model_id: str | None = None
    seq_id: int | None = None


class Routes:
    """Answers requests by asking the service."""

    def __init__(self, service: TinkerService, keys: TenantKeys) -> None:
        self._service, self._keys, self._limits = service, keys, service.limits
        self._pool = ThreadPoolExecutor(self._limits.tinker_threads, "tinker")
        self._turns = WeakValueDictionary[str, asyncio.Lock]()
        self._requests = Counter[str]()
        self._counting, self._counted_until_s = asyncio.Lock(), float("-inf")
        self._counted: tuple[list[tuple[str, dict[str, float]]], list[Spent]] = ([], [])
        self._logger = structlog.get_logger("headrace.tinker")

    def app(self) -> web.Application:
        app = web.Application(middlewares=[self.guard], client_max_size=self._limits.tinker_request_bytes)
        posts: dict[str, Handler] = {
            "client/config": self.config, "client/dynamic_config": self.dynamic_config, "telemetry": self.telemetry,
            "create_session": self.create_session, "session_heartbeat": self.heartbeat,
            "sessions/{id}/finish": self.finish, "create_model": self.create_model, "get_info": self.get_info,
            "forward_backward": self.forward_backward, "optim_step": self.optim_step,
            "save_weights": self.save_weights, "save_weights_for_sampler": self.save_weights_for_sampler,
            "save_weights_external": self.save_weights_external, "load_weights": self.load_weights,
            "weights_info": self.weights_info, "create_sampling_session": self.create_sampling_session,
            "asample": self.sample, "cancel_future": self.cancel, "retrieve_future": self.retrieve,
        }  # fmt: skip
        gets: dict[str, Handler] = {
            "healthz": self.healthz, "get_server_capabilities": self.capabilities, "samplers/{id}": self.sampler,
            "training_runs/{id}": self.training_run, "headrace/status": self.status,
        }  # fmt: skip
        app.router.add_routes([web.post(_PREFIX + path, handler) for path, handler in posts.items()])
        app.router.add_routes([web.get(_PREFIX + path, handler) for path, handler in gets.items()])
        app.router.add_delete(f"{_PREFIX}training_runs/{{id}}/checkpoints/{{kind}}/{{name}}", self.delete_weights)
        return app

    def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)

    # ------------------------------------------------------------ what all routes need

    @web.middleware
    async def guard(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Know the tenant, refuse more requests than there is room for, and answer problems."""
        tenant = ""
        try:
            if request.path != f"{_PREFIX}healthz":
                tenant = request[_TENANT] = self._keys.tenant(request.headers.get("X-API-Key", ""))
            if self._requests.total() >= self._limits.tinker_requests or (
                self._requests[tenant] >= self._service.tenants.of(tenant).requests
            ):
                text = f"{self._requests[tenant]} requests of yours are being answered: come back later"
                raise Problem(429, text, retry_after_s=self._limits.tinker_busy_s)
        except Problem as problem:
            if problem.status == 401:
                self._service.events.refused(str(problem))
            return _problem(problem)
        self._requests[tenant] += 1
        try:
            return await handler(request)
        except Problem as problem:
            return _problem(problem)
        except OperationRefused as refused:
            return _problem(Problem(400, str(refused)))
        except web.HTTPRequestEntityTooLarge as error:
            return _problem(Problem(413, f"the request is too large for its route: {error.text}"))
        except web.HTTPException as error:
            return _problem(Problem(error.status, f"{request.method} {request.path[:200]}: {error.reason}"))
        except ConnectionError:
            raise  # the client has left
        except Exception as error:
            self._logger.exception("a request could not be answered", path=request.path[:200])
            return _problem(Problem(500, f"the server failed on this request: {type(error).__name__}"))
        finally:
            self._requests[tenant] -= 1
            if not self._requests[tenant]:
                del self._requests[tenant]

    async def _body(self, request: web.Request, *, is_large: bool = False) -> bytes:
        """The body, unpacked; ``is_large``: it may have datums or a prompt in it."""
        limits = self._limits
        most_bytes = limits.tinker_request_bytes if is_large else limits.tinker_json_bytes
        try:
            async with asyncio.timeout(limits.tinker_read_s):
                return await request.clone(client_max_size=most_bytes).read()
        except TimeoutError as error:
            raise Problem(400, f"the body did not come within {limits.tinker_read_s:g} s") from error
        except web.RequestPayloadError as error:
            raise Problem(400, f"the body cannot be read by its Content-Encoding ({error})") from error

    async def _json(self, request: web.Request, kind: type[wire.M]) -> wire.M:
        body = await self._body(request)
        return await self._off_loop(request[_TENANT], lambda: wire.read_json(kind, body))

    async def _off_loop(self, tenant: str, function: Callable[[], R]) -> R:
        """Run ``function`` on a thread when it is the tenant's turn."""
        turn = self._turns.setdefault(tenant, asyncio.Lock())
        try:
            async with asyncio.timeout(self._limits.tinker_read_s), turn:
                return await asyncio.get_running_loop().run_in_executor(self._pool, function)
        except TimeoutError as error:
            text = f"the request was not read within {self._limits.tinker_read_s:g} s: ask again"
            raise Problem(503, text, retry_after_s=self._limits.tinker_busy_s) from error

    # ------------------------------------------------------------ clients and sessions

    async def healthz(self, request: web.Request) -> web.Response:
        return _json({"status": "ok"})

    async def config(self, request: web.Request) -> web.Response:
        return _json(_FLAGS)

    async def dynamic_config(self, request: web.Request) -> web.Response:
        return _json({"sample_cancel_enabled": True})

    async def telemetry(self, request: web.Request) -> web.Response:
        await self._body(request, is_large=True)
        return _json({"status": "accepted"})

    async def capabilities(self, request: web.Request) -> web.Response:
        models = [
            {"model_name": one.name, "max_context_length": one.context_tokens, "trainable": True, "sampleable": True}
            for one in self._service.served.values()
        ]
        return _json({"supported_models": models})

    async def create_session(self, request: web.Request) -> web.Response:
        asked = await self._json(request, types.CreateSessionRequest)
        metadata = {"tags": asked.tags, "user_metadata": asked.user_metadata, "sdk_version": asked.sdk_version}
        session = await self._service.begin_session(request[_TENANT], metadata)
        return _json({"type": "create_session", "session_id": session})

    async def heartbeat(self, request: web.Request) -> web.Response:
        asked = await self._json(request, types.SessionHeartbeatRequest)
        await self._service.sessions.require(request[_TENANT], asked.session_id)
        return _json({"type": "session_heartbeat"})

    async def finish(self, request: web.Request) -> web.Response:
        await self._body(request)
        await self._service.end_session(request[_TENANT], request.match_info["id"])
        return _json({"status": "ok"})

    async def status(self, request: web.Request) -> web.Response:
        """What the tenant uses; with a key of the operator, what each does. Counted once in ``tinker_busy_s``."""
        caller, loop = request[_TENANT], asyncio.get_running_loop()
        async with asyncio.timeout(self._limits.tinker_log_s), self._counting:
            if loop.time() >= self._counted_until_s:
                self._counted = sorted((await self._service.uses()).items()), await self._service.spent()
                self._counted_until_s = loop.time() + self._limits.tinker_busy_s
        uses, spent = self._counted
        shown = [
            {"tenant": tenant, **use, "by_model": [one._asdict() for one in spent if one.tenant == tenant]}
            for tenant, use in uses
            if caller in (tenant, OPERATOR)
        ]
        return _json({"tenants": shown})

    # ------------------------------------------------------------ models

    async def create_model(self, request: web.Request) -> web.Response:
        asked = await self._json(request, types.CreateModelRequest)
        number = wire.seq_of(asked.model_seq_id, "model_seq_id", 0)
        spec = wire.model_spec(asked, f"{asked.session_id}:train:{number}")
        model, future = await self._service.create_model(
            request[_TENANT], asked.session_id, number, spec, asked.base_model, asked.user_metadata or {}
        )
        return _json({"request_id": future, "model_id": model})

    async def load_weights(self, request: web.Request) -> web.Response:
        body = await self._body(request)
        asked = await self._off_loop(request[_TENANT], lambda: wire.read_json(types.LoadWeightsRequest, body))
        if asked.weights_access_token is not None:
            raise Problem(400, "weights_access_token: weights of another account are not served here")
        if asked.session_id is None:
            return await self._load_into(request, asked)
        if asked.optimizer_config is not None and asked.optimizer_config.type != "adamw":
            raise Problem(400, f"optimizer_config.type: {asked.optimizer_config.type!r} is not served: choose adamw")
        model, future = await self._service.create_model(
            request[_TENANT], asked.session_id, wire.seq_of(asked.model_seq_id, "model_seq_id", 0), None,
            asked.base_model or "", asked.user_metadata or {}, load=(asked.path, asked.optimizer),
        )  # fmt: skip
        return _json({"request_id": future, "model_id": model})

    async def _load_into(self, request: web.Request, asked: types.LoadWeightsRequest) -> web.Response:
        line = await self._service.line(request[_TENANT], asked.model_id or "")
        operation: op.Operation
        try:
            weights, _ = await self._service.find_weights(request[_TENANT], asked.path, "weights")
            operation = op.Load(asked.path, weights.directory, asked.optimizer, creates=False)
        except OperationRefused as refused:
            operation = op.Refused(str(refused))
        return await self._submitted(line, wire.seq_of(asked.seq_id), op.encode(operation))

    async def get_info(self, request: web.Request) -> web.Response:
        asked = await self._json(request, types.GetInfoRequest)
        spec = (await self._service.line(request[_TENANT], asked.model_id)).row.spec
        data = {"model_name": spec.base_model, "tokenizer_id": self._service.served[spec.base_model].tokenizer}
        info = {"type": "get_info", "model_data": data, "model_id": asked.model_id, "model_name": spec.base_model}
        return _json(info | _lora(spec.rank))

    async def weights_info(self, request: web.Request) -> web.Response:
        body = await self._body(request)
        path = str(_mapping(body).get("tinker_path", ""))
        _, model = await self._service.find_weights(request[_TENANT], path, "weights")
        spec = model.spec
        flags = {"train_mlp": spec.train_mlp, "train_attn": spec.train_attn, "train_unembed": spec.train_unembed}
        return _json({"base_model": spec.base_model} | _lora(spec.rank) | flags)

    async def training_run(self, request: web.Request) -> web.Response:
        model = await self._service.model_row(request[_TENANT], request.match_info["id"])
        run = {
            "training_run_id": model.id, "base_model": model.spec.base_model, "model_owner": model.tenant,
            "last_request_time": datetime.fromtimestamp(self._service.asked_at_s(model.id), UTC).isoformat(),
            "user_metadata": {name: str(value) for name, value in model.metadata.items()},
        }  # fmt: skip
        return _json(run | _lora(model.spec.rank))

    async def delete_weights(self, request: web.Request) -> web.Response:
        run, kind, name = (request.match_info[part] for part in ("id", "kind", "name"))
        try:
            await self._service.delete_weights(request[_TENANT], f"tinker://{run}/{kind}/{name}")
        except OperationRefused as refused:
            raise Problem(404, str(refused)) from refused
        return web.Response(status=204)

    # ------------------------------------------------------------ operations

    async def forward_backward(self, request: web.Request) -> web.Response:
        tenant, body = request[_TENANT], await self._body(request, is_large=True)
        message = await self._off_loop(tenant, lambda: wire.read_forward_backward(body, self._limits))
        line = await self._service.line(tenant, message.model_id)
        seq = wire.seq_of(message.seq_id)
        served = self._served(line)
        return await self._submitted(
            line, seq, await self._off_loop(tenant, lambda: _encoded(
                lambda: wire.forward_backward(message, served.vocabulary, served.context_tokens, self._limits)
            )),
        )  # fmt: skip

    async def optim_step(self, request: web.Request) -> web.Response:
        return await self._operation(request, lambda body, _, __: wire.optim_step(body))

    async def save_weights(self, request: web.Request) -> web.Response:
        return await self._operation(request, lambda body, _, seq: wire.save_weights(body, seq))

    async def save_weights_for_sampler(self, request: web.Request) -> web.Response:
        return await self._operation(request, wire.export)

    async def save_weights_external(self, request: web.Request) -> web.Response:
        why = "save_weights_external is not served: save_weights_for_sampler saves a PEFT or Hugging Face directory"
        return await self._operation(request, lambda *_: op.Refused(why))

    async def _operation(self, request: web.Request, make: Callable[[bytes, str, int], op.Operation]) -> web.Response:
        tenant, body = request[_TENANT], await self._body(request)
        try:
            named = msgspec.json.decode(body, type=_Named)
        except (msgspec.DecodeError, ValueError, RecursionError) as error:
            raise Problem(400, f"the body names no model_id and seq_id in JSON: {error}") from error
        line = await self._service.line(tenant, named.model_id or "")
        seq = wire.seq_of(named.seq_id)
        encoded = await self._off_loop(tenant, lambda: _encoded(lambda: make(body, line.row.id, seq)))
        return await self._submitted(line, seq, encoded)

    async def _submitted(self, line: ModelLine, seq: int, body: bytes) -> web.Response:
        future = await self._service.submit(line, seq, body)
        return _json({"request_id": future, "model_id": line.row.id})

    def _served(self, line: ModelLine) -> ServedModel:
        return self._service.served[line.row.spec.base_model]

    # ------------------------------------------------------------ samples

    async def create_sampling_session(self, request: web.Request) -> web.Response:
        asked = await self._json(request, types.CreateSamplingSessionRequest)
        sampler = await self._service.create_sampler(
            request[_TENANT], asked.session_id,
            wire.seq_of(asked.sampling_session_seq_id, "sampling_session_seq_id", 0),
            path=asked.model_path, base_model=asked.base_model,
        )  # fmt: skip
        return _json({"type": "create_sampling_session", "sampling_session_id": sampler})

    async def sampler(self, request: web.Request) -> web.Response:
        row = self._service.sampler(request[_TENANT], request.match_info["id"])
        return _json({"sampler_id": row.id, "base_model": row.base_model, "model_path": row.path})

    async def sample(self, request: web.Request) -> web.Response:
        prompt = await self._body(request, is_large=True)
        asked = await self._off_loop(request[_TENANT], lambda: wire.read_sample(prompt, self._limits))
        if asked.sampling_session_id is None:
            raise Problem(400, "sampling_session_id: it is missing: create a sampling session, and sample in it")
        row = self._service.sampler(request[_TENANT], asked.sampling_session_id)
        seq = wire.seq_of(asked.seq_id, least=0)
        served = self._service.served[row.base_model]
        name, bounds = f"{row.id}/{seq}", (served.vocabulary, served.context_tokens, self._limits)
        body = await self._off_loop(request[_TENANT], lambda: op.encode(wire.sample(asked, name, *bounds)))
        future = await self._service.sample(row, seq, body)
        ids = [f"{future}/{number}" for number in range(asked.num_samples)]
        return _json({"request_id": future, "sample_sequence_ids": ids})

    async def cancel(self, request: web.Request) -> web.Response:
        asked = await self._json(request, types.FutureRetrieveRequest)
        await self._service.cancel(request[_TENANT], asked.request_id)
        return _json({})

    # ------------------------------------------------------------ answers

    async def retrieve(self, request: web.Request) -> web.Response:
        asked = await self._json(request, types.FutureRetrieveRequest)
        answer = await self._service.retrieve(request[_TENANT], asked.request_id)
        if isinstance(answer, Pending):
            queue = "paused_rate_limit" if answer.paused else "active"
            again = {"type": "try_again", "request_id": asked.request_id, "queue_state": queue}
            return _json(again | ({"queue_state_reason": answer.why} if answer.why else {}), 408)
        if isinstance(answer, op.Failed):
            return _json({"error": answer.error, "category": "user" if answer.of_user else "server"})
        if isinstance(answer, op.Json):
            return _json(answer.value)
        body = await self._off_loop(request[_TENANT], lambda: _protobuf(answer))
        if asked.allow_metadata_only and len(body) > self._limits.tinker_inline_bytes:
            return _json({"status": "complete_metadata", "response_payload_size": len(body)})
        return web.Response(body=body, content_type=wire.PROTOBUF)


def _encoded(make: Callable[[], op.Operation]) -> bytes:
    """The operation, encoded, or one that holds its place if it is refused."""
    try:
        return op.encode(make())
    except OperationRefused as refused:
        return op.encode(op.Refused(str(refused)))


def _protobuf(answer: op.Losses | op.Samples) -> bytes:
    return wire.losses(answer) if isinstance(answer, op.Losses) else wire.samples(answer)


def _lora(rank: int) -> dict[str, Any]:
    return {"is_lora": rank > 0, "lora_rank": rank or None}


def _mapping(body: bytes) -> dict[str, Any]:
    try:
        return msgspec.json.decode(body, type=dict[str, Any])
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        raise Problem(400, f"the body is no object in JSON: {error}") from error


def _json(value: object, status: int = 200) -> web.Response:
    return web.Response(body=msgspec.json.encode(value), status=status, content_type="application/json")


def _problem(problem: Problem) -> web.Response:
    response = _json({"error": str(problem), "message": str(problem)}, problem.status)
    if problem.retry_after_s is not None:
        response.headers["Retry-After"] = str(max(1, round(problem.retry_after_s)))
    return response
