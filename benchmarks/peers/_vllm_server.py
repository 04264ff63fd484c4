"""vLLM's own HTTP server, and a client that reads its token streams (SSE) and keeps tokens and log-probabilities.

    client here ── POST, one for each sample ──▶ API server ── vLLM's sockets ──▶ EngineCore
                ◀── data: {…} for each step of each sample ──

The client does as little as one can: aiohttp's connections, a typed decoder for each event, and two lists a sample.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any, Final

import msgspec
import psutil

from benchmarks._command import Result
from benchmarks._jobs import BenchmarkFailed
from benchmarks._processes import cpu_s
from benchmarks.vllm._vllm import ENVIRONMENT, GROUP, Work, engine_arguments

ENDPOINTS: Final = {"completions": "/v1/completions", "generate": "/inference/v1/generate"}
"""OpenAI's, with text; and vLLM's own from tokens to tokens."""
MODEL: Final = "m"
START_S: Final = 240.0
ROUND_S: Final = 300.0
_LOOK_S: Final = 0.2
_END_S: Final = 10.0


class _CompletionLogprobs(msgspec.Struct):
    token_logprobs: list[float]


class _CompletionChoice(msgspec.Struct):
    token_ids: list[int]
    logprobs: _CompletionLogprobs


class Completion(msgspec.Struct):
    """What is read of an event of ``completions``."""

    choices: list[_CompletionChoice]


class _GeneratedToken(msgspec.Struct):
    logprob: float


class _GeneratedLogprobs(msgspec.Struct):
    content: list[_GeneratedToken]


class _GeneratedChoice(msgspec.Struct):
    token_ids: list[int]
    logprobs: _GeneratedLogprobs


class Generated(msgspec.Struct):
    """What is read of an event of ``generate``."""

    choices: list[_GeneratedChoice]


_completion = msgspec.json.Decoder(Completion)
_generated = msgspec.json.Decoder(Generated)


def read_completion(event: bytes) -> tuple[list[int], list[float]]:
    """Tokens and their log-probabilities."""
    choice = _completion.decode(event).choices[0]
    return choice.token_ids, choice.logprobs.token_logprobs


def read_generated(event: bytes) -> tuple[list[int], list[float]]:
    """Tokens and their log-probabilities."""
    choice = _generated.decode(event).choices[0]
    return choice.token_ids, [token.logprob for token in choice.logprobs.content]


READERS: Final = {"completions": read_completion, "generate": read_generated}


def body(endpoint: str, work: Work, index: int, prompt: list[int]) -> dict[str, Any]:
    """The request for one sample."""
    sampling: dict[str, Any] = {
        "max_tokens": work.tokens,
        "temperature": work.temperature,
        "logprobs": 0,
        "ignore_eos": True,
    }
    if work.temperature:
        sampling["seed"] = index
    if endpoint == "generate":
        return {"token_ids": prompt, "model": MODEL, "sampling_params": sampling, "stream": True}
    return {"prompt": prompt, "model": MODEL, "stream": True, "return_token_ids": True, **sampling}


class Server:
    """A running server. Its first process answers HTTP, those below it are the engine."""

    def __init__(self, process: subprocess.Popen[str], port: int) -> None:
        self._process = process
        self.url = f"http://127.0.0.1:{port}"

    def cpu_s(self) -> tuple[float, float]:
        """CPU seconds of the API server's process, and of all that it has started."""
        server = psutil.Process(self._process.pid)
        return _used_s(server), sum(_used_s(child) for child in server.children(recursive=True))

    @property
    def ended(self) -> int | None:
        """Its exit code, if it has."""
        return self._process.poll()


def _used_s(process: psutil.Process) -> float:
    times = process.cpu_times()
    return times.user + times.system


def free_port() -> int:
    """A TCP port on loopback that nobody listened at just now."""
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


@contextmanager
def server(python: str, work: Work, model: Path, log: Path) -> Iterator[Server]:
    """vLLM's server in the environment of ``python``; it ends with the block, its engine too."""
    port = free_port()
    flags: list[str] = ["--port", str(port), "--host", "127.0.0.1", "--served-model-name", MODEL, "--enable-scale-out"]
    flags += ["--disable-uvicorn-access-log"]
    for name, value in engine_arguments(work, model).items():
        flags += [f"--{name.replace('_', '-')}"] if value is True else [f"--{name.replace('_', '-')}", str(value)]
    command = [python, "-m", "vllm.entrypoints.openai.api_server", *flags]
    environment = os.environ | ENVIRONMENT | {"VLLM_RPC_BASE_PATH": str(log.parent)}
    with log.open("w") as file:
        process = subprocess.Popen(
            command, cwd=log.parent, env=environment, stdout=file, stderr=file, text=True, start_new_session=True
        )
    family = [process.pid]
    try:
        yield Server(process, port)
    finally:
        with contextlib.suppress(psutil.NoSuchProcess):
            family += [child.pid for child in psutil.Process(process.pid).children(recursive=True)]
        process.send_signal(signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(timeout=_END_S)
        for pid in family:  # an engine core outlives its parent
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        process.wait(timeout=_END_S)


class Client:
    """Reads streams of a server; one for a whole benchmark, so that its connections stay."""

    def __init__(self, session: Any, server: Server) -> None:
        self._session, self._server = session, server

    async def ready(self, log: Path) -> None:
        """Raises:
        BenchmarkFailed: the server has ended, or does not answer in ``START_S``.
        """
        give_up_s = time.monotonic() + START_S
        while time.monotonic() < give_up_s:
            if self._server.ended is not None:
                break
            with contextlib.suppress(OSError):
                async with self._session.get(f"{self._server.url}/health") as answer:
                    if answer.status == 200:
                        return
            await asyncio.sleep(_LOOK_S)
        raise BenchmarkFailed("vLLM's server does not answer:\n" + "\n".join(log.read_text().splitlines()[-20:]))

    async def round(self, endpoint: str, work: Work, number: int) -> tuple[Result, list[list[int]]]:
        """Seconds, CPU seconds by who used them, and the tokens of each sample."""
        prompts = [prompt.tolist() for prompt in work.prompts(number) for _ in range(GROUP)]
        (server_s, engine_s), used_s, began_s = self._server.cpu_s(), cpu_s(), time.perf_counter()
        async with asyncio.timeout(ROUND_S):
            tokens = await asyncio.gather(
                *(self._read(endpoint, body(endpoint, work, index, prompt)) for index, prompt in enumerate(prompts))
            )
        seconds, client_s = time.perf_counter() - began_s, cpu_s() - used_s
        server_after_s, engine_after_s = self._server.cpu_s()
        cost = {
            "seconds": seconds,
            "client_cpu_s": client_s,
            "server_cpu_s": server_after_s - server_s,
            "engine_cpu_s": engine_after_s - engine_s,
        }
        return cost, list(tokens)

    async def _read(self, endpoint: str, question: dict[str, Any]) -> list[int]:
        read, tokens, scores = READERS[endpoint], list[int](), list[float]()
        async with self._session.post(self._server.url + ENDPOINTS[endpoint], json=question) as answer:
            if answer.status != 200:
                raise BenchmarkFailed(f"{endpoint} answers {answer.status}: {await answer.text()}")
            async for line in answer.content:
                if line.startswith(b"data: {"):
                    some, with_scores = read(line[6:])
                    tokens += some
                    scores += with_scores
        if len(scores) != len(tokens):
            raise BenchmarkFailed(f"{endpoint}: {len(tokens)} tokens, {len(scores)} log-probabilities")
        return tokens


@asynccontextmanager
async def client(server: Server) -> AsyncIterator[Client]:
    """A client of one server."""
    import aiohttp

    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(total=ROUND_S)) as session:
        yield Client(session, server)


def vllm_version(python: str) -> str | None:
    """The version of vLLM in that environment; None if it cannot be imported."""
    if python == sys.executable:
        from actors.rollout.engines.vllm.setup import installed_version

        return installed_version()
    asked = subprocess.run(
        [python, "-c", "import vllm; print(vllm.__version__)"], capture_output=True, text=True, timeout=300, check=False
    )
    return asked.stdout.split()[-1] if asked.returncode == 0 else None
