"""One run of ``bench recompute`` or ``compile``: micro-batches through the torch backend, in this process alone."""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

from actors.trainer.backend import BackendSpec, LossSpec
from actors.trainer.backends.torch.torch_backend import TorchBackend
from actors.trainer.measured_size import ROW_TOKENS, made_up


async def run(
    way: str, model_path: str, tokens: int, device: str, dtype: str, compiled: bool = False
) -> dict[str, Any]:
    """The least time and peak of three passes, and the gradient's norm; how long the start took, and what it made."""
    backend = TorchBackend()
    spec = BackendSpec(
        model_path=Path(model_path), recompute=way, device=device, dtype=dtype,
        threads=len(os.sched_getaffinity(0)), learning_rate=0.0, compile=compiled,
    )  # fmt: skip
    began_s = time.perf_counter()
    await backend.start(spec)
    batch = made_up(max(1, tokens // ROW_TOKENS), min(tokens, ROW_TOKENS))
    await backend.measure(batch, LossSpec())  # the first pass allocates for good
    start_s = time.perf_counter() - began_s
    began_s, passes, graphs = time.process_time(), 3, _graphs(compiled)
    uses = [await backend.measure(batch, LossSpec()) for _ in range(passes)]
    cpu_s = (time.process_time() - began_s) / passes
    await backend.accumulate(batch, LossSpec())
    norm = (await backend.step(weight=float(tokens))).grad_norm
    await backend.close()
    assert _graphs(compiled) == graphs, "a form was compiled within the passes that were timed"
    return {
        "added_bytes": min(use.peak_bytes for use in uses),
        "seconds": round(min(use.seconds for use in uses), 3),
        "cpu_s": round(cpu_s, 3),
        "norm": norm,
        "start_s": round(start_s, 2),
        "graphs": graphs,
    }


def _graphs(compiled: bool) -> int:
    """How many graphs this process has compiled."""
    if not compiled:
        return 0
    from torch._dynamo.utils import counters

    return counters["stats"]["unique_graphs"]


if __name__ == "__main__":
    print(json.dumps(asyncio.run(run(**json.loads(sys.argv[1])))), flush=True)
