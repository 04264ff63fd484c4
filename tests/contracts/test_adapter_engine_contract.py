"""What every engine promises that serves adapters side by side, over all kinds that do: torch, fused and generic."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import pytest_asyncio
from safetensors.numpy import load_file

from actors.models.adapter import TENSOR_FILE, AdapterSpec
from actors.protocol.tokens import FinishReason
from actors.rollout.engine import AdapterEngine, EngineSpec, GenerationRequest, StepOutput, holds_adapters
from actors.rollout.engine_kinds import create_engine
from actors.rollout.engines.torch.torch_engine import TorchEngine
from actors.rollout.errors import EngineError, LogitsNotFinite, ModelUnreadable, RequestRefused, WeightsMismatch
from tests.contracts.test_rollout_engine_contract import Sample, ask, finish, record, run
from tests.made_snapshots import write_adapter
from tests.tiny_checkpoint import make_tiny_checkpoint

pytestmark = pytest.mark.asyncio(loop_scope="module")

WORLDS = {
    "torch-fused": ("torch", {"decoder": "fused", "tokens_per_step": 1}),
    "torch-generic": ("torch", {"decoder": "generic", "tokens_per_step": 1}),
}
RANKS = {1: 1, 2: 4, 3: 16, 4: 1, 5: 4, 6: 16, 7: 4, 8: 16}
"""Number of an adapter → its rank."""
TARGETS = {
    2: ("q_proj", "v_proj"),
    3: ("down_proj",),
    6: ("up_proj", "o_proj"),
    7: ("k_proj", "gate_proj", "down_proj"),
}
"""Number of an adapter → the layers that have it; the others have all."""
EVERYBODY = [0, *RANKS]
SEEDED = 1.0
GREEDY = 0.0
CONTEXT_TOKENS = 96


def spec_of(number: int) -> AdapterSpec:
    return AdapterSpec(rank=RANKS[number], alpha=2.0 * RANKS[number], targets=TARGETS.get(number, ()))


Tensors = dict[str, np.ndarray]


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_checkpoint(tmp_path_factory.mktemp("base"))


@pytest.fixture(scope="module")
def adapters(base: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[int, Tensors]:
    root = tmp_path_factory.mktemp("adapters")
    return {
        number: load_file(
            write_adapter(root / str(number), base, rank=rank, targets=TARGETS.get(number, ()), seed=number)
            / TENSOR_FILE
        )
        for number, rank in RANKS.items()
    }


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=WORLDS)
async def started(base: Path, request: pytest.FixtureRequest) -> AsyncIterator[AdapterEngine]:
    kind, options = WORLDS[request.param]
    made = create_engine(kind)
    await made.start(EngineSpec(model_path=base, max_running=20, max_context_tokens=CONTEXT_TOKENS, options=options))
    assert holds_adapters(made)
    yield made
    await made.close()


@pytest_asyncio.fixture(loop_scope="module")
async def engine(started: AdapterEngine, adapters: dict[int, Tensors]) -> AdapterEngine:
    """Empty, with all the adapters."""
    started.abort(range(1000))
    while started.has_work:
        await started.step()
    await started.load_adapter({}, {}, 0, None)
    for number, tensors in adapters.items():
        await add(started, number, tensors)
    return started


async def add(engine: AdapterEngine, number: int, tensors: Tensors) -> None:
    await engine.add_adapter(number, tensors, dict.fromkeys(tensors, "float32"), spec_of(number))


def of(number: int, request: GenerationRequest) -> GenerationRequest:
    return replace(request, adapter=number)


def asked(number: int, *, max_tokens: int = 12) -> list[GenerationRequest]:
    """A greedy and a seeded sequence of one adapter; all adapters are asked the same."""
    both = enumerate((GREEDY, SEEDED))
    return [of(number, ask(10 * number + n, max_tokens=max_tokens + n, temperature=heat)) for n, heat in both]


def check_same(engine: AdapterEngine, one: Sample, other: Sample) -> None:
    """The fused decoder promises equal bits in float32 with one thread, the generic one equal tokens."""
    assert one.tokens == other.tokens
    np.testing.assert_allclose(one.logprobs, other.logprobs, atol=1e-5)
    assert isinstance(engine, TorchEngine)
    if engine._started().options["decoder"] == "fused":
        assert one.logprobs == other.logprobs


async def test_adapters_of_three_ranks_and_the_base_in_one_batch_say_what_each_says_alone(
    engine: AdapterEngine,
) -> None:
    together = await run(engine, *(request for number in EVERYBODY for request in asked(number)))
    assert len(together) == 18, "they fit into one batch"
    for number in EVERYBODY:
        for request in asked(number):
            check_same(engine, together[request.request], (await run(engine, request))[request.request])
    assert len({tuple(sample.tokens) for sample in together.values()}) > 15, "what is asked is the same"


async def test_an_adapter_beside_others_says_what_it_says_when_it_is_the_only_one_loaded(
    engine: AdapterEngine, adapters: dict[int, Tensors]
) -> None:
    together = await run(engine, *(request for number in EVERYBODY for request in asked(number)))
    for number, tensors in adapters.items():
        await engine.load_adapter(tensors, dict.fromkeys(tensors, "float32"), number, spec_of(number))
        loaded = await run(engine, *(of(0, request) for request in asked(number)))
        for request, sample in loaded.items():
            assert together[request].tokens == sample.tokens
            np.testing.assert_allclose(together[request].logprobs, sample.logprobs, atol=1e-4)
    await engine.load_adapter({}, {}, 0, None)


async def test_sequences_do_not_notice_that_others_come_and_adapters_are_added_and_dropped(
    engine: AdapterEngine, adapters: dict[int, Tensors]
) -> None:
    lasting = [request for number in (0, 3, 4) for request in asked(number, max_tokens=40)]
    undisturbed = await run(engine, *lasting)
    samples: dict[int, Sample] = {}
    engine.add(lasting)
    for turn in range(30):
        number = 5 + turn % 4
        if turn % 8 >= 4:
            await engine.drop_adapter(number)
        else:
            await add(engine, number, adapters[number])
            engine.add([of(number, ask(500 + turn, prompt=turn, max_tokens=2))])
        record(await engine.step(), samples)
        record(await engine.step(), samples)
    await finish(engine, samples)
    assert len(samples) > len(lasting) + 10
    for request, sample in undisturbed.items():
        check_same(engine, samples[request], sample)


async def test_an_adapter_is_not_dropped_under_its_sequences_and_must_be_held_for_new_ones(
    engine: AdapterEngine,
) -> None:
    engine.add([of(5, ask(0, max_tokens=30))])
    with pytest.raises(EngineError, match="sequences of it run or wait"):
        await engine.drop_adapter(5)
    await engine.step()
    with pytest.raises(EngineError, match="sequences of it run or wait"):
        await engine.drop_adapter(5)
    engine.abort([0])
    samples = await finish(engine)
    assert samples[0].finished == FinishReason.ABORTED
    await engine.drop_adapter(5)
    await engine.drop_adapter(5)
    with pytest.raises(RequestRefused, match="not held") as refused:
        engine.add([ask(1), of(5, ask(2))])
    assert refused.value.requests == (2,)
    assert not engine.has_work, "none is queued"


async def test_prompts_that_are_alike_share_nothing_if_their_adapters_differ(engine: AdapterEngine) -> None:
    ids = [3 + i % 70 for i in range(70)]
    before = engine.stats()
    whose = [0, 3, 1, 3, 0]
    apart = [(await run(engine, of(number, ask(n, ids=ids))))[n] for n, number in enumerate(whose)]
    stats = engine.stats()
    assert stats.prefilled_tokens_total - before.prefilled_tokens_total < 3 * 70 + 2 * 32 + 1
    assert stats.prefix_hit_tokens_total - before.prefix_hit_tokens_total > 2 * 32
    check_same(engine, apart[1], apart[3])
    check_same(engine, apart[0], apart[4])
    for sample, number in zip(apart, whose, strict=True):
        scores = await engine.score(np.array([*ids, *sample.tokens], np.int32), 0, number)
        np.testing.assert_allclose(sample.logprobs, scores.logprobs[70:], atol=1e-5)
    together = await run(engine, *(of(number, ask(n, ids=ids)) for n, number in enumerate(whose)))
    for n, sample in enumerate(apart):
        check_same(engine, together[n], sample)


async def test_a_dropped_adapters_keys_are_nobodys(engine: AdapterEngine, adapters: dict[int, Tensors]) -> None:
    ids = [3 + i % 70 for i in range(70)]
    await run(engine, of(2, ask(0, ids=ids)))
    await engine.drop_adapter(2)
    new = {name: -tensor for name, tensor in adapters[2].items()}
    await engine.add_adapter(99, new, dict.fromkeys(new, "float32"), spec_of(2))
    first = (await run(engine, of(99, ask(1, ids=ids))))[1]
    scores = await engine.score(np.array([*ids, *first.tokens], np.int32), 0, 99)
    np.testing.assert_allclose(first.logprobs, scores.logprobs[70:], atol=1e-5)
    await engine.drop_adapter(99)


async def test_prompts_are_scored_by_the_adapter_that_is_named(
    engine: AdapterEngine, adapters: dict[int, Tensors]
) -> None:
    row = np.arange(3, 60, dtype=np.int32)
    engine.add(asked(7))
    beside = {number: await engine.score(row, 3, number) for number in EVERYBODY}
    await finish(engine)
    for number, tensors in adapters.items():
        await engine.load_adapter(tensors, dict.fromkeys(tensors, "float32"), number, spec_of(number))
        alone = await engine.score(row, 3)
        np.testing.assert_allclose(beside[number].logprobs, alone.logprobs, atol=1e-4)
        np.testing.assert_allclose(beside[number].top_logprobs, alone.top_logprobs, atol=1e-4)
    await engine.load_adapter({}, {}, 0, None)
    np.testing.assert_array_equal(beside[0].logprobs, (await engine.score(row, 3)).logprobs)


async def test_an_adapter_that_gives_no_numbers_harms_its_own_sequences_alone(
    engine: AdapterEngine, adapters: dict[int, Tensors]
) -> None:
    others = [request for number in (0, 2, 3) for request in asked(number)]
    undisturbed = await run(engine, *others)
    broken = {name: np.full_like(tensor, 1e38) for name, tensor in adapters[1].items()}
    await engine.add_adapter(66, broken, dict.fromkeys(broken, "float32"), spec_of(1))
    engine.add([*others, of(66, ask(600)), of(66, ask(601, prompt=1))])
    samples: dict[int, Sample] = {}
    with pytest.raises(LogitsNotFinite) as error:
        await engine.step()
    assert set(error.value.requests) == {600, 601}
    engine.abort([600, 601])
    await finish(engine, samples)
    for request, sample in undisturbed.items():
        check_same(engine, samples[request], sample)
    await engine.drop_adapter(66)


async def test_an_adapter_that_does_not_fit_is_refused_and_nothing_changes(
    engine: AdapterEngine, adapters: dict[int, Tensors]
) -> None:
    before = await run(engine, *asked(4))
    with pytest.raises(WeightsMismatch, match="missing"):
        await add(engine, 4, adapters[2])
    with pytest.raises(WeightsMismatch, match="has shape"):
        await add(engine, 4, {name: tensor[..., :-1] for name, tensor in adapters[4].items()})
    with pytest.raises(ModelUnreadable, match="'nowhere' names no linear layer"):
        await engine.add_adapter(4, {}, {}, AdapterSpec(rank=1, alpha=1.0, targets=("nowhere",)))
    after = await run(engine, *asked(4))
    for request, sample in before.items():
        check_same(engine, after[request], sample)


async def test_no_sequence_is_of_a_numbered_adapter_while_another_one_is_loaded(
    engine: AdapterEngine, adapters: dict[int, Tensors]
) -> None:
    await engine.load_adapter(adapters[1], dict.fromkeys(adapters[1], "float32"), 1, spec_of(1))
    with pytest.raises(EngineError, match="load the bare model"):
        engine.add([of(2, ask(0))])
    await engine.load_adapter({}, {}, 0, None)


# ------------------------------------------------------------ the likeliest tokens of each position


async def steps(engine: AdapterEngine, requests: Sequence[GenerationRequest]) -> list[StepOutput]:
    engine.add(requests)
    outputs: list[StepOutput] = []
    while engine.has_work:
        outputs.append(await engine.step())
    return outputs


async def test_the_likeliest_tokens_are_told_of_those_who_ask_and_nobody_elses_numbers_change(
    engine: AdapterEngine,
) -> None:
    requests = [*asked(3), *asked(0)]
    without = await run(engine, *requests)
    k = {requests[0].request: 3, requests[3].request: 5}
    outputs = await steps(engine, [replace(one, top_logprobs=k.get(one.request, 0)) for one in requests])
    seen: dict[int, Sample] = {}
    for output in outputs:
        record(output, seen)
        starts = np.cumsum(output.counts) - output.counts
        for request, start, count in zip(output.requests.tolist(), starts, output.counts, strict=True):
            if request not in k or not count:
                continue
            assert output.tops is not None
            top = output.tops[start, : k[request]]
            assert (np.diff(top["logprob"]) <= 0).all() and len(set(top["token"].tolist())) == k[request]
            drawn = np.flatnonzero(top["token"] == output.tokens[start])
            if len(drawn):
                assert top["logprob"][drawn[0]] == output.logprobs[start]
            else:
                assert output.logprobs[start] <= top["logprob"][-1]
    for request, sample in without.items():
        check_same(engine, seen[request], sample)
    assert all(output.tops is None for output in await steps(engine, asked(0))), "nobody asks any more"


async def test_what_cannot_be_drawn_is_not_among_the_likeliest(engine: AdapterEngine) -> None:
    narrow = [replace(ask(0, top_k=2, max_tokens=5), top_logprobs=4), replace(ask(1, max_tokens=5), top_logprobs=120)]
    for output in await steps(engine, narrow):
        assert output.tops is not None
        two, all_of_them = output.tops["logprob"]
        assert np.isfinite(two[:2]).all() and np.isneginf(two[2:]).all()
        np.testing.assert_allclose(np.exp(two[:2].astype(float)).sum(), 1.0, atol=1e-6)
        assert np.isfinite(all_of_them[:100]).all() and np.isneginf(all_of_them[100:]).all(), "of 100 tokens"
        np.testing.assert_allclose(np.exp(all_of_them[:100].astype(float)).sum(), 1.0, atol=1e-5)
