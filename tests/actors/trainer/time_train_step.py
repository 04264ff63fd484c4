"""Prints the seconds of one training step at the size of the quickstart: 32 groups of 8, about 25 tokens a sample.

    python tests/actors/trainer/time_train_step.py [--threads 1] [--window 32] [--degenerate 0.0] [--padded]
    [--attention dense]

Wall-clock and processor seconds, medians of 15 steps after 3; the second is the one to compare on a busy machine.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[3]))

import numpy as np

from actors.trainer.backend import BackendSpec, LossSpec
from actors.trainer.backends.torch.torch_backend import TorchBackend
from actors.trainer.learning.samples import TrainSample, cut
from tests.tiny_checkpoint import make_tiny_checkpoint

GROUPS, SIBLINGS, WARM_UP, STEPS = 32, 8, 3, 15


def batch(degenerate: float) -> list[TrainSample]:
    """Prompts of 14 to 21 tokens, responses of 4 to 11; a fraction of the groups has equal rewards."""
    rng = np.random.default_rng(0)
    samples: list[TrainSample] = []
    for prompt in range(GROUPS):
        prompt_ids = rng.integers(3, 100, int(rng.integers(14, 22))).astype(np.int32)
        for sibling in range(SIBLINGS):
            r = int(rng.integers(4, 12))
            advantage = float(rng.normal()) if prompt >= degenerate * GROUPS else 0.0
            samples.append(
                TrainSample(
                    prompt=prompt,
                    sibling=sibling,
                    prompt_ids=prompt_ids,
                    tokens=rng.integers(3, 100, r).astype(np.int32),
                    logprobs=np.full(r, -4.6, np.float32),
                    stale=np.zeros(r, np.bool_),
                    advantage=advantage,
                )
            )
    return samples


async def main(arguments: argparse.Namespace) -> None:
    with tempfile.TemporaryDirectory() as directory:
        model = make_tiny_checkpoint(Path(directory) / "model", hidden=96, layers=3, vocab=100)
        backend = TorchBackend()
        spec = BackendSpec(
            model_path=model, threads=arguments.threads, learning_rate=3e-4, attention=arguments.attention
        )
        await backend.start(spec)
        assert backend._core is not None
        if arguments.padded:
            backend._core.policy.replicas.members[0].logits.may_pack = False
        samples, rows = batch(arguments.degenerate), []
        for _ in range(WARM_UP + STEPS):
            wall_s, cpu_s = time.perf_counter(), time.process_time()
            for start in range(0, GROUPS, arguments.window):
                window = [s for s in samples if start <= s.prompt < start + arguments.window]
                for micro_batch in cut(window, budget_tokens=16_384, keep_zero=False):
                    await backend.accumulate(micro_batch, LossSpec())
            await backend.step(weight=2000.0)
            trained_s = time.perf_counter() - wall_s, time.process_time() - cpu_s
            wall_s = time.perf_counter()
            await backend.export_segment(Path(directory) / "segment", job="j", policy_version=0, chunk_bytes=2 << 20)
            rows.append((*trained_s, time.perf_counter() - wall_s))
        train_s, cpu_s, export_s = np.median(np.array(rows[WARM_UP:]), axis=0)
        print(f"train step {train_s:.4f} s wall, {cpu_s:.4f} s processor; export {export_s:.4f} s")
        await backend.close()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--window", type=int, default=GROUPS)
    parser.add_argument("--degenerate", type=float, default=0.0)
    parser.add_argument("--padded", action="store_true")
    parser.add_argument("--attention", default="blocks")
    asyncio.run(main(parser.parse_args()))
