"""Deltas of consecutive versions: a bfloat16 model, trained by the real backend at a learning rate of 1e-6.

    backend ─ accumulate, step, export ─▶ version v+1   against   version v ─▶ encode ─▶ decode ─▶ equal, bit for bit?

Encoding is the weight server's, decoding the puller's, one thread each; throughput is of the version's bytes. The
gradients are of GRPO's loss on random responses with random advantages: which weights change depends on Adam's step,
which is near the learning rate for all of them, and hardly on what the gradient is of.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from pathlib import Path
from time import perf_counter
from typing import Final

import numpy as np

from actors.trainer.backend import BackendSpec, LossSpec
from actors.trainer.batching import TrainSample, cut
from actors.weights.delta import apply_delta, encode_delta
from actors.weights.manifest import chunk_bounds
from actors.weights.memory import map_segment
from actors.weights.messages import Manifest
from benchmarks import _baseline
from benchmarks._baseline import Ratio
from benchmarks._command import Result, command_line, measured, show
from benchmarks._jobs import hardware
from configs.limits import DEFAULT_LIMITS

RATIOS: Final = (Ratio("bytes_fraction", ceiling=0.05), Ratio("ratio_10_gbit", ceiling=1.0, tolerance=0.25))
DEFAULT_BYTES: Final = 40_000_000
STEPS: Final = 4
LINK_BYTES_S: Final = 10e9 / 8
"""10 Gbit/s: what encoding and decoding must be faster than."""


def batch(rng: np.random.Generator) -> list[TrainSample]:
    """Four groups of four random responses."""
    samples: list[TrainSample] = []
    for prompt in range(4):
        prompt_ids = rng.integers(3, 100, 8).astype(np.int32)
        for sibling in range(4):
            tokens = rng.integers(3, 100, 12).astype(np.int32)
            logprobs, stale = np.full(12, -4.6, np.float32), np.zeros(12, np.bool_)
            samples.append(
                TrainSample(
                    prompt=prompt,
                    sibling=sibling,
                    prompt_ids=prompt_ids,
                    tokens=tokens,
                    logprobs=logprobs,
                    stale=stale,
                    advantage=float(rng.normal()),
                )
            )
    return samples


async def versions(model: Path, scratch: Path, steps: int) -> list[tuple[Manifest, memoryview]]:
    """Version 0, and one for each step."""
    from actors.trainer.backends.torch_backend import TorchBackend

    backend, rng, made = TorchBackend(), np.random.default_rng(0), list[tuple[Manifest, memoryview]]()
    await backend.start(BackendSpec(model_path=model, dtype="bfloat16", threads=2, learning_rate=1e-6))
    for version in range(steps + 1):
        if version:
            for micro_batch in cut(batch(rng), budget_tokens=16_384, keep_zero=False):
                await backend.accumulate(micro_batch, LossSpec())
            await backend.step(weight=16.0)
        path = scratch / f"segment-v{version}"
        chunk_bytes = DEFAULT_LIMITS.bulk_chunk_bytes
        manifest = await backend.export_segment(path, job="bench", policy_version=version, chunk_bytes=chunk_bytes)
        made.append((manifest, map_segment(path)))
    await backend.close()
    return made


def compare(manifest: Manifest, new: memoryview, old: memoryview) -> tuple[int, float, float]:
    """Bytes of all deltas, and seconds to make and to apply them."""
    place = bytearray(manifest.total_bytes)
    bounds = [chunk_bounds(manifest, index) for index in range(len(manifest.chunk_hashes))]
    began = perf_counter()
    deltas = [encode_delta(new[start:end], old[start:end], 2) for start, end in bounds]
    encode_s = perf_counter() - began
    began = perf_counter()
    for (start, end), delta in zip(bounds, deltas, strict=True):
        if delta is not None:
            apply_delta(delta, old[start:end], memoryview(place)[start:end])
    decode_s = perf_counter() - began
    for (start, end), delta in zip(bounds, deltas, strict=True):
        assert delta is None or place[start:end] == new[start:end], "a delta must be lossless"
    size = sum(end - start if delta is None else len(delta) for (start, end), delta in zip(bounds, deltas, strict=True))
    return size, encode_s, decode_s


def measure(options: argparse.Namespace, scratch: Path) -> Result:
    """All of it in ``scratch``."""
    from benchmarks.weights import make_model

    machine = hardware()
    make_model(scratch / "model", options.bytes)
    made = asyncio.run(versions(scratch / "model", scratch, options.steps))
    pairs = list(zip(made[1:], made[:-1], strict=True))
    compare(pairs[0][0][0], pairs[0][0][1], pairs[0][1][1])  # to warm up
    found = np.array([compare(manifest, new, old) for (manifest, new), (_, old) in pairs])
    total = made[0][0].total_bytes
    fraction, encode_s, decode_s = np.median(found, axis=0) / (total, 1, 1)
    return {
        "hardware": machine,
        "bytes": total,
        "versions": len(made),
        "bytes_fraction": round(float(fraction), 4),
        "encode_gb_per_second": round(total / encode_s / 1e9, 2),
        "decode_gb_per_second": round(total / decode_s / 1e9, 2),
        "ratio_10_gbit": round(float((encode_s + decode_s) / (total / LINK_BYTES_S)), 3),
    }


def main(args: list[str]) -> int:
    """Measure and print."""
    parser = command_line("delta", __doc__)
    parser.add_argument("--bytes", type=int, default=DEFAULT_BYTES, help="size of the model's weights")
    parser.add_argument("--steps", type=int, default=STEPS, help="optimizer steps; medians over them are printed")
    _baseline.add_options(parser)
    options = parser.parse_args(args)
    result = measured(measure, options)
    code = _baseline.settle(result, "delta", RATIOS, options)
    show(result, options)
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
