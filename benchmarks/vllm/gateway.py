"""What a token costs on its way to an agent, beside vLLM's own OpenAI server on the same conversations and tokens.

    agents here ──HTTP──▶ vLLM's server ──▶ its engine core, a process of its own           vLLM
    agents here ──HTTP──▶ gateway ──links──▶ here: a scheduler that says vLLM's tokens      ours

The agents are plain HTTP clients that hold conversations of several turns, with log-probabilities and token ids in the
replies, as training wants them. CPU is that of the one process that speaks HTTP: it renders, tokenises, decodes and
writes JSON on either side. The two take turns, and who waits is idle; medians. At temperature 0 vLLM says the same in
each round, and the gateway's agents must read just these tokens.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import statistics
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import aiohttp
import msgspec
import numpy as np
import psutil

from actors.core.actor import Actor, concurrent, handles
from actors.protocol.episodes import EpisodeName, EpisodeRecord, GetEpisode, TakeTurn, TurnTaken
from actors.protocol.failures import Acknowledged
from actors.protocol.job_news import Trouble
from actors.protocol.services import RegisterService
from actors.protocol.session_keys import SessionKeys, admin_key
from actors.protocol.tokens import FinishReason
from actors.roles import RoleArgs
from benchmarks._command import Result, command_line, measured, show
from benchmarks._jobs import BenchmarkFailed, hardware
from benchmarks._processes import beside, on_uvloop
from benchmarks.data_plane._echo import new_system
from benchmarks.data_plane.tokens import WAIT_S, said
from benchmarks.vllm._vllm import ENVIRONMENT, KV_CACHE_BYTES
from configs.schema import JobConfig

JOB: Final = "bench"
ROUNDS: Final = 3
_READY_S: Final = 300.0
"""Seconds within which vLLM's server is up."""
_LOOK_S: Final = 0.5
Episodes = list[list[list[int]]]
"""Token ids of each turn of each conversation."""


@dataclass(frozen=True, slots=True)
class Load:
    """How much is said in a round."""

    episodes: int = 16
    turns: int = 4
    tokens: int = 128
    """Length of each turn of the model."""
    question_words: int = 40

    @property
    def total_tokens(self) -> int:
        return self.episodes * self.turns * self.tokens

    def question(self, episode: int, turn: int) -> dict[str, str]:
        words = ["the", "castering", "json", "prostering", "mister", "lokata"]
        noise = np.random.default_rng([episode, turn])
        return {"role": "user", "content": " ".join(noise.choice(words, self.question_words).tolist()) + "?"}


def make_model(directory: Path) -> Path:
    """A random checkpoint with a byte-level BPE of 2,000 entries and a chat template."""
    from tests.actors.gateway.bpe_tokenizer import MARKERS, VOCABULARY, make_tokenizer
    from tests.tiny_checkpoint import make_tiny_checkpoint

    make_tiny_checkpoint(
        directory, vocab=VOCABULARY + len(MARKERS), hidden=64, layers=1, heads=2, kv_heads=1, max_position=4096
    )
    make_tokenizer().save_pretrained(directory)
    return directory


class Canned(Actor):
    """Answers in the place of a scheduler, from what it was given."""

    def __init__(self, episodes: Episodes) -> None:
        self._episodes = episodes
        self._turns: dict[EpisodeName, int] = {}

    @handles(RegisterService)
    async def register(self, message: RegisterService) -> Acknowledged:
        return Acknowledged()

    @handles(Trouble)
    async def trouble(self, message: Trouble) -> None: ...

    @handles(GetEpisode)
    async def record(self, message: GetEpisode) -> EpisodeRecord:
        return EpisodeRecord(status="live", model_tokens_left=1 << 20, tokens_left=1 << 20, turns_left=64, left_s=600.0)

    @handles(TakeTurn)
    @concurrent
    async def take(self, message: TakeTurn) -> TurnTaken:
        turn = self._turns[message.episode] = self._turns.get(message.episode, -1) + 1
        tokens = np.array(self._episodes[message.episode.prompt][turn], np.int32)
        return TurnTaken(
            status="taken", offset=message.offset + len(message.tokens), tokens=tokens,
            logprobs=np.full(len(tokens), -1.5, np.float32), versions=np.zeros(len(tokens), np.int32),
            finish=int(FinishReason.LENGTH),
        )  # fmt: skip


class Server:
    """Runs a process that speaks HTTP, and counts what it has cost."""

    def __init__(self, url: str, pid: int) -> None:
        self.url, self._process = url, psutil.Process(pid)

    @property
    def cpu_s(self) -> float:
        used = self._process.cpu_times()
        return used.user + used.system

    async def round(self, load: Load, further: dict[str, Any], keys: list[str]) -> tuple[Result, Episodes]:
        """All conversations at once; seconds, CPU seconds, and what was said."""
        timeout = aiohttp.ClientTimeout(total=WAIT_S)
        async with aiohttp.ClientSession(timeout=timeout) as client:
            began_s, used_s = time.perf_counter(), self.cpu_s
            talks = (self._converse(client, load, number, further, key) for number, key in enumerate(keys))
            episodes = await asyncio.gather(*talks)
        return {"seconds": time.perf_counter() - began_s, "cpu_s": self.cpu_s - used_s}, episodes

    async def _converse(
        self, client: aiohttp.ClientSession, load: Load, episode: int, further: dict[str, Any], key: str
    ) -> list[list[int]]:
        messages: list[dict[str, Any]] = []
        turns: list[list[int]] = []
        for turn in range(load.turns):
            messages.append(load.question(episode, turn))
            asked = {"model": JOB, "messages": messages, "max_tokens": load.tokens, "logprobs": True}
            body = msgspec.json.encode(asked | {"return_token_ids": True} | further)
            headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
            async with client.post(f"{self.url}/chat/completions", data=body, headers=headers) as answer:
                found = msgspec.json.decode(await answer.read())
            if answer.status != 200:
                raise BenchmarkFailed(f"{self.url} answers {answer.status}: {found}")
            choice = found["choices"][0]
            turns.append(choice["token_ids"])
            messages.append({"role": "assistant", "content": choice["message"]["content"]})
        return turns


@asynccontextmanager
async def vllm_server(model: Path, load: Load, log: Path) -> AsyncIterator[Server]:
    """vLLM's own server, up."""
    from tests.free_ports import free_ports

    port = free_ports(1)
    command = [
        *(sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", model, "--served-model-name", JOB),
        *("--host", "127.0.0.1", "--port", port, "--dtype", "float32", "--max-model-len", 4096, "--enforce-eager"),
        *("--max-num-seqs", load.episodes, "--kv-cache-memory-bytes", KV_CACHE_BYTES, "--disable-log-stats"),
        *("--generation-config", "vllm"),
    ]
    with _logged(list(map(str, command)), log) as process:
        url = f"http://127.0.0.1:{port}/v1"
        await _until_up(url, process, log)
        yield Server(url, process.pid)


@contextlib.contextmanager
def _logged(command: list[str], log: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A process of vLLM, whose engine core has another; it ends with the block."""
    environment = os.environ | {k: v for k, v in ENVIRONMENT.items() if k != "VLLM_ENABLE_V1_MULTIPROCESSING"}
    with log.open("w") as output:
        process = subprocess.Popen(command, env=environment, stdout=output, stderr=output)
        try:
            yield process
        finally:
            process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(timeout=WAIT_S)
            process.kill()
            process.wait(timeout=WAIT_S)


async def _until_up(url: str, process: subprocess.Popen[bytes], log: Path) -> None:
    async with asyncio.timeout(_READY_S), aiohttp.ClientSession() as client:
        while process.poll() is None:
            with contextlib.suppress(aiohttp.ClientError):
                async with client.get(f"{url}/models") as answer:
                    if answer.status == 200:
                        return
            await asyncio.sleep(_LOOK_S)
    raise BenchmarkFailed(f"vLLM's server did not start: {log.read_text()[-2000:]}")


@asynccontextmanager
async def gateway(model: Path, directory: Path, episodes: Episodes, load: Load) -> AsyncIterator[Server]:
    """A gateway whose scheduler is here."""
    directory.mkdir()
    job = JobConfig.model_validate(
        {
            "name": JOB,
            "steps": 1,
            "model": {"source": "hf", "path": str(model)},
            "data": {"source": "jsonl", "path": "unused"},
            "environment": {"kind": "agent", "path": "a:b", "turns_max": load.turns},
            "rollout": {"max_tokens": load.turns * load.tokens},
        }
    )
    system = new_system("head")
    await system.start()
    try:
        await system.spawn("scheduler", Canned(episodes))
        role = RoleArgs(
            role="gateway", name="gateway", node="bench", job=job.model_dump_json(), model_path=str(model),
            run_dir=str(directory), scheduler=system.address("scheduler"), metrics=system.address("metrics"),
        )  # fmt: skip
        with beside("vllm._gateway", msgspec.json.encode(role).decode()) as process:
            yield Server(await said(process), process.pid)
    finally:
        await system.stop()


def _keys(directory: Path, load: Load, number: int) -> list[str]:
    keys = SessionKeys(admin_key(directory), JOB)
    return [keys.sign(EpisodeName(number, episode, 0, 1)) for episode in range(load.episodes)]


async def _measure(load: Load, rounds: int, directory: Path) -> Result:
    model = make_model(directory / "model")
    mine: list[Result] = []
    theirs: list[Result] = []
    fixed = {"temperature": 0, "ignore_eos": True}
    async with contextlib.AsyncExitStack() as stack:
        peer = await stack.enter_async_context(vllm_server(model, load, directory / "vllm.log"))
        _, episodes = await peer.round(load, fixed, ["none"] * load.episodes)
        own = await stack.enter_async_context(gateway(model, directory / "run", episodes, load))
        await own.round(load, {}, _keys(directory / "run", load, 0))
        for number in range(1, rounds + 1):
            cost, heard = await own.round(load, {}, _keys(directory / "run", load, number))
            if heard != episodes:
                raise BenchmarkFailed("the gateway's agents read other tokens than the scheduler said")
            mine.append(cost)
            cost, _ = await peer.round(load, fixed, ["none"] * load.episodes)
            theirs.append(cost)
    our_us, their_us = _per_token(load, mine), _per_token(load, theirs)
    return {
        "cpu_us_per_token": our_us,
        "vllm_cpu_us_per_token": their_us,
        "ratio": round(our_us / their_us, 3),
        "ratios": [round(a["cpu_s"] / b["cpu_s"], 3) for a, b in zip(mine, theirs, strict=True)],
        "rounds": rounds,
        "episodes": load.episodes,
        "turns": load.turns,
        "tokens_each": load.tokens,
    }


def _per_token(load: Load, rounds: list[Result]) -> float:
    return round(statistics.median(row["cpu_s"] for row in rounds) / load.total_tokens * 1e6, 2)


def measure(options: argparse.Namespace, directory: Path) -> Result:
    """All of it in ``directory``."""
    machine = hardware()
    load = Load(options.episodes, options.turns, options.tokens)
    return {"hardware": machine, **on_uvloop(_measure(load, options.rounds, directory))}


def main(args: list[str]) -> int:
    """Measure and print."""
    parser = command_line("gateway", __doc__)
    usual = Load()
    parser.add_argument("--episodes", type=int, default=usual.episodes, help="conversations at once")
    parser.add_argument("--turns", type=int, default=usual.turns, help="of each conversation")
    parser.add_argument("--tokens", type=int, default=usual.tokens, help="of each turn")
    parser.add_argument("--rounds", type=int, default=ROUNDS, help="of each side, after one for warming up")
    options = parser.parse_args(args)
    show(measured(measure, options), options)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
