"""The torch engine tells of each token which experts predicted it: those that the trainer would choose, too."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from actors.models.routers import Recorder
from actors.protocol.tokens import FinishReason
from actors.protocol.work import SamplingParams
from actors.rollout.engine import EngineSpec, GenerationRequest
from actors.rollout.engines.torch.torch_engine import TorchEngine
from actors.rollout.errors import ModelUnreadable
from actors.trainer.backend import BackendSpec
from actors.trainer.backends.torch.causal_lm import load_model
from benchmarks.gpu._model_family import make_model
from benchmarks.gpu.model_families import FAMILIES

PROMPTS = (np.arange(3, 12, dtype=np.int32), np.arange(20, 60, dtype=np.int32))
SAMPLING = SamplingParams(max_tokens=16, seed=5, stop_token_ids=(1,))
NOTHING = np.zeros(0, np.int32)
Said = dict[int, tuple[list[int], list[list[int]]]]
"""Request → its tokens and their routes."""


@pytest.fixture(scope="module", params=["qwen3_moe", "deepseek_v3"])
def directory(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("moe")
    make_model(request.param, FAMILIES[request.param], path)
    return path


def request(number: int, generated: np.ndarray = NOTHING) -> GenerationRequest:
    prompt = PROMPTS[number % 2]
    return GenerationRequest(
        request=number, prompt=number % 2, sibling=number // 2, prompt_ids=prompt, generated=generated,
        sampling=SAMPLING,
    )  # fmt: skip


async def started(directory: Path) -> TorchEngine:
    engine = TorchEngine()
    options = {"tokens_per_step": 1}
    await engine.start(
        EngineSpec(model_path=directory, max_running=8, max_context_tokens=64, records_routes=True, options=options)
    )
    return engine


async def said(engine: TorchEngine, found: Said, steps: int = 99) -> Said:
    while engine.has_work and steps:
        output = await engine.step()
        steps -= 1
        at = 0
        for number, count in zip(output.requests.tolist(), output.counts.tolist(), strict=True):
            tokens, routes = found.setdefault(number, ([], []))
            tokens += output.tokens[at : at + count].tolist()
            if count:
                assert output.routes is not None
                routes += output.routes[at : at + count].tolist()
            at += count
    return found


async def test_routes_are_those_of_the_position_that_predicts_in_shared_rows_and_behind_known_prefixes(
    directory: Path,
) -> None:
    """Siblings share rows of the cache, one joins late, and one begins behind a prompt that the cache knows."""
    engine, found = await started(directory), Said()
    engine.add([request(number) for number in range(4)])
    await said(engine, found, 3)
    engine.add([request(4), request(5)])
    await said(engine, found)
    await engine.close()
    model = load_model(directory, BackendSpec(model_path=directory))
    recorder = Recorder(model)
    for number, (tokens, routes) in found.items():
        path = [*PROMPTS[number % 2].tolist(), *tokens]
        assert len(routes) == len(tokens)
        for at in range(len(tokens)):
            with torch.no_grad():
                model(input_ids=torch.tensor([path[: len(path) - len(tokens) + at]]), use_cache=False)
            assert recorder.newest(1)[0].tolist() == routes[at], (number, at)


async def test_a_sample_that_moves_has_the_routes_that_it_would_have_had_in_place(directory: Path) -> None:
    first, found = await started(directory), Said()
    first.add([request(0), request(2)])
    await said(first, found, 4)
    kept = {number: (tokens[:4], routes[:4]) for number, (tokens, routes) in found.items()}
    await said(first, found)
    await first.close()
    second = await started(directory)
    second.add([request(number, np.array(tokens, np.int32)) for number, (tokens, _) in kept.items()])
    moved = await said(second, {})
    await second.close()
    for number, (tokens, routes) in found.items():
        assert kept[number][0] + moved[number][0] == tokens
        assert kept[number][1] + moved[number][1] == routes


async def test_an_aborted_request_ends_without_routes(directory: Path) -> None:
    engine = await started(directory)
    engine.add([request(0)])
    await engine.step()
    engine.abort([0])
    output = await engine.step()
    assert output.finished.tolist() == [FinishReason.ABORTED] and output.routes is None
    await engine.close()


async def test_a_model_without_experts_is_refused(tmp_path: Path) -> None:
    make_model("qwen3", FAMILIES["qwen3"], tmp_path)
    with pytest.raises(ModelUnreadable, match="router_replay is set, and Qwen3ForCausalLM has no experts"):
        await started(tmp_path)
