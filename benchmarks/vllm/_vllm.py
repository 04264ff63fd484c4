"""The processes of the benchmarks with vLLM: a rollout worker of ours, and vLLM's AsyncLLM with its consumer.

    python -m benchmarks.vllm._vllm worker ARGS       RolloutWorker with the vLLM engine, and a meter of what it costs
    python -m benchmarks.vllm._vllm async_llm ARGS    AsyncLLM; a line of its standard input is a round of prompts

Each says where it is, or that it is ready, then serves until its standard input ends. ARGS are JSON.

Both run the same model with the same block size and cache, one torch thread for the model, and log-probabilities of
the distribution that was sampled. AsyncLLM's engine core has a process of its own, as vLLM has it.
"""

# pyright: reportMissingImports=false
# vLLM is an optional extra.

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

import msgspec
import numpy as np

from actors.core.actor import Actor, handles
from actors.core.message import Message, message
from actors.roles import RoleArgs
from actors.rollout.engine import EngineSpec
from actors.rollout.engines.vllm.engine import VllmEngine
from actors.rollout.worker import RolloutWorker
from benchmarks._processes import cpu_s, on_uvloop, until_input_ends
from benchmarks.data_plane._echo import new_system
from transport.address import ActorAddress

WORKER: Final = "rollout-0"
METER: Final = "meter"
GROUP: Final = 8
"""Samples of each prompt, as in GRPO."""
VOCABULARY: Final = 1000
KV_CACHE_BYTES: Final = 256 << 20
BLOCK_TOKENS: Final = 32
ENVIRONMENT: Final = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the engine core's process also runs the model: one process fewer
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
    "VLLM_PLUGINS": "",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_USE_V2_MODEL_RUNNER": "0",
    "HF_HUB_OFFLINE": "1",
    "TORCHDYNAMO_DISABLE": "1",
}
"""What vLLM's own processes are told: the same as ours, so that neither computes in another way."""


@dataclass(frozen=True, slots=True)
class Work:
    """What is generated in a round, by which model."""

    streams: int = 64
    """Samples at once."""
    tokens: int = 256
    """Length of each response."""
    prompt_tokens: int = 32
    temperature: float = 0.0
    """0: both sides say the same tokens. Above, both seed each request, and the samples are of equal lengths only."""
    hidden: int = 128
    layers: int = 4

    @property
    def total_tokens(self) -> int:
        return self.streams * self.tokens

    def prompts(self, number: int) -> list[np.ndarray]:
        """int32[prompt_tokens] each: those of round ``number``, every one for ``GROUP`` samples."""
        noise = np.random.default_rng(number)
        shape = (self.streams // GROUP, self.prompt_tokens)
        return list(noise.integers(5, VOCABULARY, shape).astype(np.int32))

    def make_model(self, path: Path) -> Path:
        """A random checkpoint in ``path``; float32, heads of 32, as vLLM on a CPU can run it."""
        from tests.tiny_checkpoint import make_tiny_checkpoint

        heads = self.hidden // 32
        return make_tiny_checkpoint(
            path, vocab=VOCABULARY, hidden=self.hidden, layers=self.layers, heads=heads, kv_heads=max(1, heads // 2),
            max_position=max(512, self.prompt_tokens + self.tokens),
        )  # fmt: skip


def engine_arguments(work: Work, model: Path) -> dict[str, Any]:
    """Arguments of vLLM's ``EngineArgs`` for its own front ends; the rest is as vLLM has it."""
    return {
        "model": str(model),
        "dtype": "float32",
        "max_model_len": work.prompt_tokens + work.tokens,
        "max_num_seqs": work.streams,
        "block_size": BLOCK_TOKENS,
        "kv_cache_memory_bytes": KV_CACHE_BYTES,
        "logprobs_mode": "processed_logprobs",
        "enforce_eager": True,
        "disable_log_stats": True,
        "generation_config": "vllm",
    }


# ------------------------------------------------------------ ours


@message("bench.get_cost")
class GetCost(Message):
    """What the worker's process has used until now."""


@message("bench.cost")
class Cost(Message):
    process_s: float
    """CPU seconds of the whole process."""
    vllm_s: float
    """The part of them that was spent in the steps of vLLM's EngineCore."""


class MeteredEngine(VllmEngine):
    """Knows what of its process's CPU time is vLLM's own: its steps, which compute on one thread."""

    vllm_s = 0.0

    async def start(self, spec: EngineSpec) -> None:
        await super().start(spec)
        core: Any = self._live_core._core  # noqa: SLF001 - nobody else knows what is vLLM's
        for name in ("step_fn", "post_step"):
            setattr(core, name, self._timed(getattr(core, name)))

    def _timed(self, function: Any) -> Any:
        def timed(*args: Any, **kwargs: Any) -> Any:
            began_s = time.thread_time()
            try:
                return function(*args, **kwargs)
            finally:
                self.vllm_s += time.thread_time() - began_s

        return timed


class Meter(Actor):
    """Beside the worker."""

    def __init__(self, engine: MeteredEngine) -> None:
        self._engine = engine

    @handles(GetCost)
    async def cost(self, _: GetCost) -> Cost:
        return Cost(process_s=cpu_s(), vllm_s=self._engine.vllm_s)


class Worker(RolloutWorker):
    """Serves what it has read from the disk as version 0, as there is no trainer."""

    async def register(self) -> None:
        self._generation.policy_version = 0
        await super().register()


async def _serve_worker(args: dict[str, Any]) -> None:
    role = msgspec.convert(args["role"], RoleArgs)
    engine = MeteredEngine()
    system = new_system(WORKER)
    await system.start()
    await system.spawn(METER, Meter(engine))
    await system.spawn(WORKER, Worker(role, engine))
    _say(msgspec.json.encode(system.address(METER)).decode())
    await until_input_ends()
    await system.stop()


# ------------------------------------------------------------ AsyncLLM


async def _serve_async_llm(args: dict[str, Any]) -> None:
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    work = Work(**args["work"])
    arguments = engine_arguments(work, Path(args["model"]))
    engine = AsyncLLM.from_engine_args(AsyncEngineArgs(**arguments, skip_tokenizer_init=True))
    _say("ready")
    loop = asyncio.get_running_loop()
    try:
        while line := await loop.run_in_executor(None, sys.stdin.readline):
            _say(json.dumps(await _consume(engine, work, int(line))))
    finally:
        engine.shutdown()


async def _consume(engine: Any, work: Work, number: int) -> dict[str, Any]:
    """One round: every sample as a stream of outputs, its tokens and log-probabilities kept."""
    from vllm.sampling_params import RequestOutputKind, SamplingParams

    async def consume(index: int, prompt: list[int]) -> list[int]:
        sampling = SamplingParams(
            max_tokens=work.tokens, temperature=work.temperature, seed=index if work.temperature else None, logprobs=0,
            ignore_eos=True, detokenize=False, output_kind=RequestOutputKind.DELTA,
        )  # fmt: skip
        tokens: list[int] = []
        scores: list[float] = []
        async for output in engine.generate({"prompt_token_ids": prompt}, sampling, f"{number}.{index}"):
            said = output.outputs[0]
            tokens.extend(said.token_ids)
            scores.extend(row[token].logprob for row, token in zip(said.logprobs, said.token_ids, strict=True))
        assert len(scores) == len(tokens)
        return tokens

    prompts = [prompt.tolist() for prompt in work.prompts(number) for _ in range(GROUP)]
    began, used = time.perf_counter(), cpu_s()
    tokens = await asyncio.gather(*(consume(index, prompt) for index, prompt in enumerate(prompts)))
    return {"seconds": time.perf_counter() - began, "consumer_cpu_s": cpu_s() - used, "tokens": tokens}


# ------------------------------------------------------------ both

_stdout = sys.stdout


def _say(line: str) -> None:
    print(line, file=_stdout, flush=True)


def worker_args(role: RoleArgs) -> str:
    """ARGS of ``worker``."""
    return json.dumps({"role": msgspec.to_builtins(role)})


def async_llm_args(work: Work, model: Path) -> str:
    """ARGS of ``async_llm``."""
    return json.dumps({"work": asdict(work), "model": str(model)})


def meter_at(line: str) -> ActorAddress:
    """What ``worker`` says of itself."""
    return msgspec.json.decode(line, type=ActorAddress)


def main(kind: str, args: dict[str, Any]) -> None:
    """Be the process that ``kind`` names."""
    global _stdout
    _stdout = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # libraries that print are not taken for us
    os.environ.update(ENVIRONMENT)
    on_uvloop(_serve_worker(args) if kind == "worker" else _serve_async_llm(args))


if __name__ == "__main__":
    main(sys.argv[1], json.loads(sys.argv[2]))
