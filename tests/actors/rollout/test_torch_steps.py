"""How much one step of the torch engine does: by tokens, or by time."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from actors.rollout.engine import EngineSpec, GenerationRequest
from actors.rollout.engines.torch_engine import TorchEngine
from actors.rollout.messages import SamplingParams
from tests.tiny_checkpoint import make_tiny_checkpoint


@pytest.mark.parametrize(
    ("options", "tokens"),
    [({"tokens_per_step": 1}, 1), ({"tokens_per_step": 4}, 4), ({"step_ms": 1e-6}, 1), ({"step_ms": 1e6}, 9)],
)
async def test_a_step_ends_after_its_tokens_or_its_time_or_when_nothing_is_left(
    tmp_path: Path, options: dict[str, Any], tokens: int
) -> None:
    model = make_tiny_checkpoint(tmp_path, vocab=50, hidden=32, heads=2, kv_heads=1)
    engine = TorchEngine()
    await engine.start(EngineSpec(model_path=model, max_running=2, max_context_tokens=32, options=options))
    sampling = SamplingParams(max_tokens=9, seed=1)
    ids = np.array([3, 4, 5], np.int32)
    request = GenerationRequest(
        request=1, prompt=0, sibling=0, prompt_ids=ids, generated=np.zeros(0, np.int32), sampling=sampling
    )
    engine.add([request])
    output = await engine.step()
    assert output.counts.tolist() == [tokens]
    await engine.close()
