"""One torch engine serves adapters of any shape, the bare model and other models in turn, and scores prompts."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import numpy as np
import pytest
import pytest_asyncio
from safetensors.numpy import load_file

from actors.models.adapter import TENSOR_FILE, AdapterSpec
from actors.rollout.engine import EngineSpec
from actors.rollout.engines.torch.prompt_scorer import PromptScorer
from actors.rollout.engines.torch.torch_engine import TorchEngine
from actors.rollout.errors import LogitsNotFinite, ModelUnreadable, WeightsMismatch
from actors.trainer.backend import BackendSpec
from actors.trainer.backends.torch.torch_backend import TorchBackend
from tests.actors.trainer.backends.test_adapter import scores_of, train
from tests.contracts.test_rollout_engine_contract import Sample, ask, finish, record, run
from tests.made_snapshots import write_adapter
from tests.tiny_checkpoint import make_tiny_checkpoint

SPECS = {
    "one": AdapterSpec(rank=1, alpha=2.0),
    "four": AdapterSpec(rank=4, alpha=8.0, targets=("q_proj", "down_proj")),
    "sixteen": AdapterSpec(rank=16, alpha=32.0, targets=("up_proj",)),
    "head": AdapterSpec(rank=2, alpha=4.0, targets=("up_proj", "lm_head")),
}
"""The head of the model is its input embedding, which stays as it is beside the head's adapter."""
Tensors = dict[str, np.ndarray]


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_checkpoint(tmp_path_factory.mktemp("base"))


@pytest.fixture(scope="module")
def adapters(base: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Tensors]:
    root = tmp_path_factory.mktemp("adapters")
    made = {
        name: write_adapter(root / name, base, rank=spec.rank, targets=spec.targets, seed=number)
        for number, (name, spec) in enumerate(SPECS.items())
    }
    return {name: load_file(directory / TENSOR_FILE) for name, directory in made.items()}


async def started(path: Path, decoder: str = "fused", adapter: AdapterSpec | None = None) -> TorchEngine:
    engine = TorchEngine()
    spec = EngineSpec(
        model_path=path, max_running=6, max_context_tokens=96, adapter=adapter, options={"decoder": decoder}
    )
    await engine.start(spec)
    return engine


@pytest_asyncio.fixture(params=["fused", "generic"])
async def engine(base: Path, request: pytest.FixtureRequest) -> AsyncIterator[TorchEngine]:
    made = await started(base, request.param)
    yield made
    await made.close()


async def said(engine: TorchEngine) -> list[Sample]:
    return [*(await run(engine, *(ask(n, prompt=n, max_tokens=10) for n in range(3)))).values()]


async def load(engine: TorchEngine, name: str, tensors: Tensors, version: int) -> None:
    await engine.load_adapter(tensors, dict.fromkeys(tensors, "float32"), version, SPECS[name])


def same(one: list[Sample], other: list[Sample]) -> bool:
    return [(s.tokens, s.logprobs) for s in one] == [(s.tokens, s.logprobs) for s in other]


async def test_an_adapter_of_any_shape_gives_what_an_engine_of_its_own_gives_whatever_was_loaded_before(
    base: Path, engine: TorchEngine, adapters: dict[str, Tensors]
) -> None:
    bare = await said(engine)
    for version, name in enumerate(["one", "sixteen", "head", "four", "one", "head", "four"], 1):
        await load(engine, name, adapters[name], version)
        assert engine.policy_version == version
        decoder = str(engine._started().options["decoder"])
        alone = await started(base, decoder, SPECS[name])
        await alone.load_weights(
            adapters[name], dict.fromkeys(adapters[name], "float32"), version, in_flight="recompute"
        )
        answers = await said(engine)
        assert same(answers, await said(alone)) and not same(answers, bare)
        await alone.close()
    await engine.load_adapter({}, {}, 9, None)
    assert same(await said(engine), bare), "the bare model comes back bit for bit"


async def test_a_whole_model_can_be_loaded_with_adapters_beside_it_and_the_first_one_comes_back(
    base: Path, engine: TorchEngine, adapters: dict[str, Tensors], tmp_path: Path
) -> None:
    other = make_tiny_checkpoint(tmp_path / "other", seed=3)
    bare = await said(engine)
    await load(engine, "head", adapters["head"], 1)
    await engine.load_model(other, 2)
    alone = await started(other, str(engine._started().options["decoder"]))
    assert same(await said(engine), await said(alone))
    for version, name in enumerate(("one", "head"), 3):
        await load(engine, name, adapters[name], version)
        await load(alone, name, adapters[name], version)
        assert same(await said(engine), await said(alone)), "an adapter stands beside the model that was loaded last"
    await engine.load_model(base, 5)
    assert same(await said(engine), bare)
    await alone.close()


async def test_a_load_that_is_refused_changes_nothing(
    engine: TorchEngine, adapters: dict[str, Tensors], tmp_path: Path
) -> None:
    await load(engine, "four", adapters["four"], 1)
    before = await said(engine)
    with pytest.raises(WeightsMismatch, match="missing"):
        await load(engine, "one", adapters["four"], 2)
    short = {name: array[..., :-1] for name, array in adapters["one"].items()}
    with pytest.raises(WeightsMismatch, match="has shape"):
        await load(engine, "one", short, 2)
    with pytest.raises(ModelUnreadable, match="'nowhere' names no linear layer"):
        await engine.load_adapter({}, {}, 2, AdapterSpec(rank=1, alpha=1.0, targets=("nowhere",)))
    with pytest.raises(WeightsMismatch, match=r"differs from the served Qwen3ForCausalLM in .*hidden_size"):
        await engine.load_model(make_tiny_checkpoint(tmp_path / "wide", hidden=64), 2)
    with pytest.raises(WeightsMismatch, match="holds a LlamaForCausalLM"):
        await engine.load_model(make_tiny_checkpoint(tmp_path / "llama", architecture="llama"), 2)
    with pytest.raises(ModelUnreadable, match=r"no config\.json"):
        await engine.load_model(tmp_path / "nothing", 2)
    assert engine.policy_version == 1
    assert same(await said(engine), before)


async def test_prompts_are_scored_as_the_trainer_scores_them_and_as_sampled_tokens_were(
    base: Path, engine: TorchEngine, tmp_path: Path
) -> None:
    spec, backend = AdapterSpec(rank=4, alpha=8.0), TorchBackend()
    await backend.start(BackendSpec(model_path=base, adapter=spec, learning_rate=0.02))
    await train(backend)
    (tmp_path / "snapshot").mkdir()
    await backend.export_checkpoint(tmp_path / "snapshot")
    tensors = load_file(tmp_path / "snapshot" / TENSOR_FILE)
    await engine.load_adapter(tensors, dict.fromkeys(tensors, "float32"), 1, spec)
    sample = (await run(engine, ask(0, max_tokens=40)))[0]
    row = np.array([3, 4, 5, 6, 7, *sample.tokens], np.int32)
    scores = await engine.score(row, 3)
    assert np.isnan(scores.logprobs[0]) and np.isnan(scores.top_logprobs[0]).all()
    np.testing.assert_allclose(scores.logprobs[5:], sample.logprobs, atol=1e-5)
    trained = await scores_of(backend, row[1:].tolist(), prompt=row[:1].tolist())
    np.testing.assert_allclose(scores.logprobs[1:], trained, atol=1e-5)
    assert (np.diff(scores.top_logprobs[1:], axis=1) <= 0).all()
    for at in range(1, len(row)):
        found = np.flatnonzero(scores.top_ids[at] == row[at])
        if len(found):
            assert scores.top_logprobs[at, found[0]] == scores.logprobs[at]
        else:
            assert scores.logprobs[at] <= scores.top_logprobs[at, -1]
    await backend.close()


async def test_running_sequences_do_not_notice_that_a_prompt_is_scored(engine: TorchEngine) -> None:
    undisturbed = await said(engine)
    engine.add([ask(n, prompt=n, max_tokens=10) for n in range(3)])
    samples: dict[int, Sample] = {}
    while engine.has_work and not samples:
        engine.hurry()
        record(await engine.step(), samples)
        await engine.score(np.arange(3, 40, dtype=np.int32), 2)
    await finish(engine, samples)
    assert same([samples[n] for n in range(3)], undisturbed)


@pytest.mark.parametrize("architecture", ["qwen3", "gpt2", "opt"])
async def test_a_prompt_scored_in_parts_has_the_scores_of_one_part(tmp_path: Path, architecture: str) -> None:
    engine = await started(make_tiny_checkpoint(tmp_path, architecture=architecture), "auto")
    prompt = (np.arange(41, dtype=np.int32) * 7) % 90 + 3
    whole = await engine.score(prompt, 4)
    scorer = PromptScorer(engine._model, in_parts=True, part_logits=350)
    parts = scorer.score(prompt, 4)  # 3 positions at a time
    np.testing.assert_allclose(parts.logprobs, whole.logprobs, atol=1e-5)
    np.testing.assert_allclose(parts.top_logprobs, whole.top_logprobs, atol=1e-5)
    one = await engine.score(prompt[:1], 0)
    assert one.logprobs.shape == (1,) and one.top_ids.shape == (1, 0)
    await engine.close()


async def test_weights_that_give_no_numbers_are_told_of_and_others_can_be_served(
    engine: TorchEngine, adapters: dict[str, Tensors]
) -> None:
    bare = await said(engine)
    broken = {name: np.full_like(array, np.inf) for name, array in adapters["one"].items()}
    await load(engine, "one", broken, 1)
    with pytest.raises(LogitsNotFinite):
        await engine.score(np.arange(3, 9, dtype=np.int32), 0)
    engine.add([ask(n, prompt=n) for n in range(9)])
    with pytest.raises(LogitsNotFinite):
        await engine.step()
    engine.abort(range(9))
    while engine.has_work:
        await engine.step()
    await engine.load_adapter({}, {}, 2, None)
    assert same(await said(engine), bare)


async def test_nothing_of_broken_weights_stays_beside_what_later_prompts_share(
    engine: TorchEngine, adapters: dict[str, Tensors]
) -> None:
    broken = {name: np.full_like(array, np.inf) for name, array in adapters["one"].items()}
    await load(engine, "one", broken, 1)
    engine.add([ask(0, ids=[*range(3, 83)])])
    with pytest.raises(LogitsNotFinite):
        await engine.step()
    engine.abort([0])
    while engine.has_work:
        await engine.step()
    await engine.load_adapter({}, {}, 2, None)
    for request, more in enumerate(([7], [8, 9, 10, 11, 12]), 1):
        sample = (await run(engine, ask(request, ids=[*range(3, 43), *more])))[request]
        assert np.isfinite(sample.logprobs).all() and len(sample.tokens) == 8
