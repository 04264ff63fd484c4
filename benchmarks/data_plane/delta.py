"""Deltas of consecutive versions: a bfloat16 model, trained by the real backend at a learning rate of 1e-6.

    backend ─ accumulate, step, export ─▶ version v+1   against   version v ─▶ encode ─▶ decode ─▶ equal, bit for bit?

Encoding is the weight server's, which maps each version when it comes and uses all cores, decoding the puller's, on
one thread into a spare whose pages are there; both in shared memory. Throughput is of the version's bytes. The
gradients are of GRPO's loss on random responses with random advantages: which weights change depends on Adam's step,
which is near the learning rate for all of them, and hardly on what the gradient is of.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import Final

import numpy as np

from actors.protocol.weights import Manifest
from actors.trainer.backend import BackendSpec, LossSpec
from actors.trainer.learning.samples import TrainSample, cut
from actors.weights.delta import apply_delta
from actors.weights.delta_source import DeltaSource
from actors.weights.manifest import chunk_bounds, chunk_is_intact
from actors.weights.memory import SegmentWriter, map_segment, partial_path
from actors.weights.segments import segment_directory
from benchmarks import _baseline
from benchmarks._baseline import Ratio
from benchmarks._command import Result, command_line, measured, show
from benchmarks._jobs import hardware
from configs.limits import DEFAULT_LIMITS

RATIOS: Final = (Ratio("bytes_fraction", ceiling=0.05), Ratio("ratio_10_gbit", ceiling=1.0, tolerance=0.25))
DEFAULT_BYTES: Final = 200_000_000
STEPS: Final = 5
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


@dataclass(frozen=True, slots=True)
class Version:
    """As it is published."""

    manifest: Manifest
    segment: Path


async def versions(model: Path, scratch: Path, steps: int) -> list[Version]:
    """Version 0, and one for each step."""
    from actors.trainer.backends.torch.torch_backend import TorchBackend

    backend, rng, made = TorchBackend(), np.random.default_rng(0), list[Version]()
    await backend.start(BackendSpec(model_path=model, dtype="bfloat16", threads=2, learning_rate=1e-6))
    for version in range(steps + 1):
        if version:
            for micro_batch in cut(batch(rng), budget_tokens=16_384, keep_zero=False):
                await backend.accumulate(micro_batch, LossSpec())
            await backend.step(weight=16.0)
        path = scratch / f"segment-v{version}"
        chunk_bytes = DEFAULT_LIMITS.bulk_chunk_bytes
        manifest = await backend.export_segment(path, job="bench", policy_version=version, chunk_bytes=chunk_bytes)
        made.append(Version(manifest, path))
    await backend.close()
    return made


def compare(new: Version, base: memoryview, spare: SegmentWriter) -> tuple[tuple[int, float, float], memoryview]:
    """Bytes of all deltas against ``base``, seconds to make and apply them; and the new version, the next base."""
    manifest, held = new.manifest, new.segment.with_name("held")
    spare.prepare(held, manifest.total_bytes)
    place = memoryview(spare.begin(held, manifest.total_bytes)[0])
    bounds = [chunk_bounds(manifest, index) for index in range(len(manifest.chunk_hashes))]
    began = perf_counter()
    view = map_segment(new.segment)
    deltas = DeltaSource(manifest, view, base).make(range(len(bounds)))
    encode_s = perf_counter() - began
    began = perf_counter()
    for index, delta in deltas.items():
        start, end = bounds[index]
        apply_delta(delta, base[start:end], place[start:end])
    decode_s = perf_counter() - began
    assert all(chunk_is_intact(manifest, index, place[slice(*bounds[index])]) for index in deltas), "not lossless"
    partial_path(held).unlink()
    size = sum(len(deltas[index]) if index in deltas else end - start for index, (start, end) in enumerate(bounds))
    return (size, encode_s, decode_s), view


def measure(options: argparse.Namespace, scratch: Path) -> Result:
    """All of it in ``scratch``."""
    from benchmarks.data_plane.weights import make_model

    machine = hardware()
    make_model(scratch / "model", options.bytes)
    with tempfile.TemporaryDirectory(prefix="headrace-bench-", dir=segment_directory()) as memory:
        made = asyncio.run(versions(scratch / "model", Path(memory), options.steps))
        spare, base, rows = SegmentWriter(), map_segment(made[0].segment), list[tuple[int, float, float]]()
        for new in made[1:]:
            row, base = compare(new, base, spare)
            rows.append(row)
    total = made[0].manifest.total_bytes
    fraction, encode_s, decode_s = np.median(rows[1:], axis=0) / (total, 1, 1)  # the first is for warming up
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
