"""The parts of `bench gpu` that measure one component: python -m benchmarks.gpu._gpu_parts PART ARGS, ARGS being JSON.

Each prints one line of JSON. Times are of the host's clock with the card synchronised before both readings.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from time import perf_counter
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor

from actors.protocol.work import SamplingParams
from actors.rollout.engine import GenerationRequest
from actors.rollout.engines.torch.torch_engine import TorchEngine
from actors.trainer.backend import LossSpec
from actors.trainer.backends.torch.torch_backend import TorchBackend
from actors.trainer.learning.samples import TrainSample, cut
from benchmarks._command import Result
from benchmarks.gpu._gpu_limits import copy_rate, host_copies, matmul_rate, timed
from benchmarks.gpu._gpu_residency import residency
from benchmarks.gpu._gpu_setting import SMALL, Setting, Work, samples_of

PARAMETER_BYTES: Final = 20
"""What docs/guides/real_model.md says the trainer needs for each parameter."""
_ROUNDS: Final = 3


# ---------------------------------------------------------------------- decode


async def decode(setting: Setting) -> Result:
    """Tokens a second, prefill included, of prompts that differ: nothing is shared."""
    work, result = setting.work, Result()
    prompts = np.random.default_rng(0).integers(3, work.vocab, (max(work.rows), work.prompt_tokens)).astype(np.int32)
    engine = await setting.engine(max(work.rows))
    ours: dict[int, float] = {}
    for rows in work.rows:
        await _generate(engine, prompts[:rows], 4)
        ours[rows] = await _generate(engine, prompts[:rows], work.decoded_tokens)
    await engine.close()
    model, rate = setting.load(), copy_rate(setting.device)
    weights_bytes = sum(parameter.nbytes for parameter in model.parameters())
    kv_bytes = 2 * 2 * work.layers * work.kv_heads * work.head_dim
    for rows in work.rows:
        ids = torch.from_numpy(prompts[:rows].astype(np.int64)).to(setting.device)
        _transformers_generate(model, ids, 4)
        peer_s = timed(lambda ids=ids: _transformers_generate(model, ids, work.decoded_tokens), setting.device)
        tokens = rows * work.decoded_tokens
        step_bytes = weights_bytes + rows * kv_bytes * (work.prompt_tokens + work.decoded_tokens / 2)
        result[f"{rows}_rows"] = {
            "ours_tokens_per_second": round(tokens / ours[rows]),
            "generate_tokens_per_second": round(tokens / peer_s),
            "ratio": round(peer_s / ours[rows], 2),
            "ours_ms_a_token": round(1000 * ours[rows] / work.decoded_tokens, 2),
            "bandwidth_limit_ms_a_token": round(1000 * step_bytes / rate, 2),
        }
    return {"parameters": weights_bytes // 2, "copy_gb_per_second": round(rate / 1e9), **result}


async def _generate(engine: TorchEngine, prompts: np.ndarray, new_tokens: int) -> float:
    """Seconds until all ``prompts`` have ``new_tokens`` tokens."""
    sampling = SamplingParams(max_tokens=new_tokens, temperature=1.0, stop_token_ids=(), seed=0)
    none = np.zeros(0, np.int32)
    requests = [
        GenerationRequest(request=row, prompt=row, sibling=0, prompt_ids=ids, generated=none, sampling=sampling)
        for row, ids in enumerate(prompts)
    ]
    began, tokens = perf_counter(), 0
    engine.add(requests)
    while engine.has_work:
        tokens += len((await engine.step()).tokens)
    assert tokens == len(prompts) * new_tokens, f"{tokens} tokens of {len(prompts)} x {new_tokens}"
    return perf_counter() - began


def _transformers_generate(model: Any, ids: Tensor, new_tokens: int) -> None:
    with torch.inference_mode():
        out = model.generate(
            ids, attention_mask=torch.ones_like(ids), do_sample=True, temperature=1.0, top_k=0, top_p=1.0,
            max_new_tokens=new_tokens, eos_token_id=-1, pad_token_id=0,
        )  # fmt: skip
    assert out.shape[1] == ids.shape[1] + new_tokens


# ---------------------------------------------------------------------- train


async def train(setting: Setting) -> Result:
    """Tokens a second, prompts counted once for each response, of prompts that differ and of groups of siblings."""
    work = setting.work
    shapes = {"distinct": samples_of(work, 1), "siblings": samples_of(work, work.siblings)}
    backend, ours = await setting.backend(), dict[str, float]()
    for name, samples in shapes.items():
        batches = cut(samples, budget_tokens=work.micro_batch_tokens, keep_zero=True)
        ours[name] = await _step_s(lambda batches=batches: _our_step(backend, batches), setting.device)
    await backend.close()
    peer, result = _PlainLoop(setting), Result()
    parameters, rate = sum(p.numel() for p in peer.model.parameters()), matmul_rate(setting.device)
    for name, samples in shapes.items():
        peer_s = await _step_s(lambda samples=samples: peer.step(samples), setting.device)
        tokens = sum(sample.length for sample in samples)
        result[name] = {
            "ours_tokens_per_second": round(tokens / ours[name]),
            "loop_tokens_per_second": round(tokens / peer_s),
            "ratio": round(peer_s / ours[name], 2),
            "flops_fraction": round(6 * parameters * tokens / ours[name] / rate, 3),
        }
    return {"matmul_tflops": round(rate / 1e12), **result}


async def _our_step(backend: TorchBackend, batches: list[Any]) -> None:
    weight = 0.0
    for batch in batches:
        weight += (await backend.accumulate(batch, LossSpec())).weight
    result = await backend.step(weight=weight)
    assert not result.skipped


async def _step_s(step: Callable[[], Any], device: str) -> float:
    """Median seconds of a step after one for warming up."""
    times: list[float] = []
    for _ in range(_ROUNDS + 1):
        began = perf_counter()
        await step()
        if device == "cuda":
            torch.cuda.synchronize()
        times.append(perf_counter() - began)
    return statistics.median(times[1:])


class _PlainLoop:
    """What one would write by hand: padded rows, logits of the responses only, AdamW on the bfloat16 weights."""

    def __init__(self, setting: Setting) -> None:
        self._device, self._work = setting.device, setting.work
        self.model = setting.load().train()
        self._adam = torch.optim.AdamW(self.model.parameters(), lr=1e-6, fused=True)

    async def step(self, samples: list[TrainSample]) -> None:
        """All samples are of one length here."""
        rows, response = self._work.micro_batch_tokens // samples[0].length, self._work.new_tokens
        for start in range(0, len(samples), rows):
            part = samples[start : start + rows]
            ids = torch.from_numpy(np.stack([np.concatenate([s.prompt_ids, s.tokens]) for s in part]).astype(np.int64))
            ids, advantages = ids.to(self._device), torch.tensor([s.advantage for s in part], device=self._device)
            logits = self.model(input_ids=ids, use_cache=False, logits_to_keep=response + 1).logits[:, :-1]
            logprobs = logits.float().log_softmax(-1).gather(-1, ids[:, -response:, None])[..., 0]
            (-(logprobs * advantages[:, None]).sum() / (len(samples) * response)).backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self._adam.step()
        self._adam.zero_grad()


# ---------------------------------------------------------------------- weights, sleep, memory


async def weights(setting: Setting) -> Result:
    """Publication, and pull and load on the same machine, against copies of as many bytes."""
    from benchmarks.data_plane.weights import Bench, Children

    with contextlib.ExitStack() as exits:
        bench = Bench(Children(exits), setting.scratch, setting.model(), device=setting.device)
        await bench.start()
        try:
            for _ in range(setting.work.versions + 1):  # the first is for warming up
                await bench.publish()
                await bench.pull_here()
            size = bench.segment.stat().st_size
        finally:
            await bench.stop()
    seconds = {name: statistics.median(values[1:]) for name, values in bench.found.items()}
    down_s, up_s = host_copies(size, setting.device)
    out_s, in_s = down_s + seconds["memcpy"], seconds["memcpy"] + up_s
    return {
        "bytes": size,
        "pinned_from_card_s": round(down_s, 4),
        "pinned_to_card_s": round(up_s, 4),
        **{f"{name}_s": round(value, 4) for name, value in seconds.items()},
        "ratio_publish_stall": round(seconds["publish_stall"] / out_s, 2),
        "ratio_map_and_load": round(seconds["map_and_load"] / in_s, 2),
    }


async def sleep(setting: Setting) -> Result:
    """Both levels, after tokens were made, so that there is a cache."""
    rows = setting.work.rows[0]
    prompts = np.full((rows, setting.work.prompt_tokens), 5, np.int32)
    engine, result = await setting.engine(rows), Result()
    for level in (1, 2):
        if level == 1:
            await _generate(engine, prompts, 4)
        awake = setting.bytes_in_use()
        began = perf_counter()
        await engine.sleep(level)
        slept, asleep = perf_counter(), setting.bytes_in_use()
        await engine.wake()
        result[f"level_{level}"] = {
            "sleep_s": round(slept - began, 4),
            "wake_s": round(perf_counter() - slept, 4),
            "awake_bytes": awake,
            "asleep_bytes": asleep,
        }
        if level == 1:
            await _generate(engine, prompts, 4)
    size = sum(file.stat().st_size for file in setting.model().glob("*.safetensors"))
    down_s, up_s = host_copies(size, setting.device)
    return {
        **result,
        "ratio_sleep": round(result["level_1"]["sleep_s"] / down_s, 2),
        "ratio_wake": round(result["level_1"]["wake_s"] / up_s, 2),
    }


async def memory(setting: Setting) -> Result:
    """At rest for each parameter; and of a micro-batch with gradient checkpointing, beside the size of whole logits."""
    work, backend = setting.work, await setting.backend(checkpointing=True)
    samples = samples_of(work, 1)
    await _our_step(backend, cut(samples[:1], budget_tokens=work.micro_batch_tokens, keep_zero=True))
    size = sum(file.stat().st_size for file in setting.model().glob("*.safetensors"))
    parameters, rest = size // 2, setting.bytes_in_use()
    if setting.device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    (batch, *_) = cut(samples, budget_tokens=work.micro_batch_tokens, keep_zero=True)
    stats = await backend.accumulate(batch, LossSpec())
    more, logits = setting.bytes_in_use(peak=True) - rest, stats.tokens * 2 * work.vocab * 2
    await backend.close()
    return {
        "parameters": parameters,
        "bytes_a_parameter": round(rest / parameters, 2),
        "documented": PARAMETER_BYTES,
        "ratio": round(rest / parameters / PARAMETER_BYTES, 3),
        "micro_batch_response_tokens": stats.tokens,
        "micro_batch_bytes": more,
        "whole_logits_bytes": logits,
        "ratio_micro_batch_to_logits": round(more / logits, 2),
    }


PARTS: Final = {part.__name__: part for part in (decode, train, weights, sleep, residency, memory)}


def main(name: str, args: dict[str, Any]) -> None:
    """Measure the part ``name``."""
    setting = Setting(args["device"], Path(args["scratch"]), SMALL if args["small"] else Work())
    print(json.dumps(asyncio.run(PARTS[name](setting))), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], json.loads(sys.argv[2]))
