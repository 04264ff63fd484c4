"""What a trainer publishes is what an engine serves, bit for bit, whatever device either computes on.

trainer, a step taken ─ export ─▶ segment, its hashes right ─ mapped ─▶ engine: the same weights
                                                                             └ its log-probabilities are the trainer's
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from actors.models.adapter import AdapterSpec
from actors.protocol.weights import Manifest
from actors.rollout.engine import EngineSpec
from actors.rollout.engines.torch.torch_engine import TorchEngine
from actors.trainer.backend import BackendSpec, LossSpec
from actors.trainer.backends.torch.torch_backend import TorchBackend
from actors.trainer.learning.samples import cut
from actors.weights.manifest import check_manifest, chunk_bounds, chunk_is_intact, tensor_views
from actors.weights.memory import map_file
from tests.actors.trainer.random_samples import random_samples
from tests.contracts.test_rollout_engine_contract import ask, run
from tests.tiny_checkpoint import make_tiny_checkpoint

CHUNK_BYTES = 4096
ADAPTER = AdapterSpec(rank=4, alpha=8.0)
PLACES = [
    ("cpu", "cpu"),
    *(pytest.param(*pair, marks=pytest.mark.gpu) for pair in [("cuda", "cuda"), ("cuda", "cpu"), ("cpu", "cuda")]),
]
"""Of the trainer, and of the engine."""
CLOSE = {"float32": 1e-4, "bfloat16": 0.1}
"""How far apart log-probabilities may be: sums are in another order, and in bfloat16 each layer rounds."""


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_checkpoint(tmp_path_factory.mktemp("model"), hidden=64)


async def trained(model_path: Path, **changes: Any) -> TorchBackend:
    backend = TorchBackend()
    await backend.start(BackendSpec(model_path=model_path, learning_rate=0.02, **changes))
    samples = random_samples([(5, [4, 7, 3]), (3, [6, 2, 8])])
    for batch in cut(samples, budget_tokens=10_000, keep_zero=False):
        await backend.accumulate(batch, LossSpec())
    await backend.step(weight=30.0)
    return backend


async def published(backend: TorchBackend, path: Path, version: int) -> tuple[Manifest, dict[str, np.ndarray]]:
    """Mapped, as a puller on the same machine has it."""
    manifest = await backend.export_segment(path, job="j", policy_version=version, chunk_bytes=CHUNK_BYTES)
    with path.open("rb") as file:
        segment = map_file(file)
    check_manifest(manifest)
    for index in range(len(manifest.chunk_hashes)):
        assert chunk_is_intact(manifest, index, segment[slice(*chunk_bounds(manifest, index))])
    return manifest, tensor_views(manifest, segment)


@pytest.mark.parametrize("adapter", [None, ADAPTER], ids=["whole", "adapter"])
@pytest.mark.parametrize("dtype", list(CLOSE))
@pytest.mark.parametrize(("trainer", "engine_on"), PLACES)
async def test_an_engine_serves_the_published_weights_and_agrees_with_the_trainer(
    model_path: Path, tmp_path: Path, trainer: str, engine_on: str, dtype: str, adapter: AdapterSpec | None
) -> None:
    backend = await trained(model_path, device=trainer, dtype=dtype, adapter=adapter)
    manifest, tensors = await published(backend, tmp_path / "segment", 3)
    assert backend._core is not None
    held = backend._core.policy.parameters.by_name()
    assert {name: array.tobytes() for name, array in tensors.items()} == {
        name: tensor.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes() for name, tensor in held.items()
    }
    engine = TorchEngine()
    spec = EngineSpec(model_path=model_path, dtype=dtype, device=engine_on, adapter=adapter, max_context_tokens=64)
    await engine.start(spec)
    dtypes = {entry.name: entry.dtype for entry in manifest.tensors}
    await engine.load_weights(tensors, dtypes, 3, in_flight="recompute")
    if adapter is None:
        served = dict(engine._model.named_parameters())
        assert all(torch.equal(served[name].cpu(), tensor.cpu()) for name, tensor in held.items())
    said = (await run(engine, ask(0, ids=[3, 4, 5, 6, 7], max_tokens=12)))[0]
    np.testing.assert_allclose(said.logprobs, await scores_of(backend, said.tokens), atol=CLOSE[dtype])
    await engine.close()
    await backend.close()


async def scores_of(backend: TorchBackend, tokens: list[int]) -> np.ndarray:
    """The trainer's log-probabilities of ``tokens`` behind the prompt 3, 4, 5, 6, 7."""
    [sample] = random_samples([(5, [len(tokens)])])
    sample = dataclasses.replace(sample, prompt_ids=np.arange(3, 8, dtype=np.int32), tokens=np.array(tokens, np.int32))
    [batch] = cut([sample], budget_tokens=10_000, keep_zero=False)
    return (await backend.score(batch, temperature=1.0, reference=False))[0, 5 : 5 + len(tokens)]
