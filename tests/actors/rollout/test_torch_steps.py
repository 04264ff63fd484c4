"""How much one step of the torch engine does: by tokens, or by time."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from actors.protocol.work import SamplingParams
from actors.rollout.engine import EngineSpec, GenerationRequest
from actors.rollout.engines.torch.torch_engine import TorchEngine
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


def siblings(count: int, *, temperature: float) -> list[GenerationRequest]:
    """Of one prompt."""
    sampling = SamplingParams(max_tokens=12, seed=1, temperature=temperature)
    ids, nothing = np.array([3, 4, 5], np.int32), np.zeros(0, np.int32)
    return [
        GenerationRequest(request=i, prompt=0, sibling=i, prompt_ids=ids, generated=nothing, sampling=sampling)
        for i in range(count)
    ]


class Interrupted(TorchEngine):
    """Somebody comes while its third token is made."""

    made = 0

    def _advance(self) -> None:
        self.made += 1
        if self.made == 3:
            self.hurry()
        super()._advance()


@pytest.mark.parametrize(("options", "tokens"), [({"step_ms": 1e6}, [3, 9]), ({"tokens_per_step": 4}, [4, 4])])
async def test_a_timed_step_ends_with_the_token_in_which_somebody_came_and_a_counted_one_does_not(
    tmp_path: Path, options: dict[str, Any], tokens: list[int]
) -> None:
    model = make_tiny_checkpoint(tmp_path, vocab=50, hidden=32, heads=2, kv_heads=1)
    engine = Interrupted()
    await engine.start(EngineSpec(model_path=model, max_running=2, max_context_tokens=32, options=options))
    engine.add(siblings(1, temperature=1.0))
    engine.hurry()  # before a step: nobody has to wait for one
    assert [(await engine.step()).counts.tolist() for _ in tokens] == [[count] for count in tokens]
    await engine.close()


async def generate(tmp_path: Path, requests: list[GenerationRequest]) -> tuple[dict[int, list[int]], list[int]]:
    """The tokens of each request, and how many rows the decoder computed in each of its steps."""
    model = make_tiny_checkpoint(tmp_path, vocab=8, hidden=32, heads=2, kv_heads=1)
    engine = TorchEngine()
    options = {"tokens_per_step": 1}
    await engine.start(EngineSpec(model_path=model, max_running=8, max_context_tokens=32, options=options))
    decoder, computed = engine._ready(), list[int]()
    decode = decoder.decode
    decoder.decode = lambda tokens, *more: (computed.append(len(tokens)), decode(tokens, *more))[1]  # type: ignore[method-assign]
    engine.add(requests)
    said: dict[int, list[int]] = {request.request: [] for request in requests}
    while engine.has_work:
        output = await engine.step()
        ends = np.cumsum(output.counts)
        for name, count, end in zip(output.requests.tolist(), output.counts.tolist(), ends.tolist(), strict=True):
            said[name] += output.tokens[end - count : end].tolist()
    await engine.close()
    return said, computed


async def test_siblings_that_say_the_same_are_computed_once(tmp_path: Path) -> None:
    said, computed = await generate(tmp_path, siblings(8, temperature=0.0))
    assert len({tuple(tokens) for tokens in said.values()}) == 1
    assert computed == [1] * 11


async def test_siblings_share_a_row_until_they_differ_and_say_what_each_would_say_alone(tmp_path: Path) -> None:
    requests = siblings(8, temperature=1.0)
    said, computed = await generate(tmp_path, requests)
    distinct = [len({tuple(tokens[: t + 1]) for tokens in said.values() if len(tokens) > t + 1}) for t in range(11)]
    assert computed == [rows for rows in distinct if rows]
    assert 1 < distinct[0] < 8, "eight siblings choose among eight tokens: some of them choose alike"
    for request in requests:
        alone, _ = await generate(tmp_path, [request])
        assert alone[request.request] == said[request.request]
