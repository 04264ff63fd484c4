"""What every rollout engine promises, over all kinds: torch (fused and generic), simulated, vllm.

Kinds with ``-adapter`` serve versions that are adapters of the checkpoint; ``ranks`` are several processes that
compute each step together; kinds that end in ``-cuda`` need a device. ``server`` speaks HTTP: to a small server of the
tests, ``server-reload`` to one without our extension, and ``server-vllm`` to a real ``vllm serve``.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import pytest_asyncio

from actors.models.adapter import AdapterSpec, tensor_names
from actors.protocol.tokens import FinishReason
from actors.protocol.work import SamplingParams
from actors.rollout.engine import EngineSpec, GenerationRequest, RolloutEngine, StepOutput
from actors.rollout.engine_kinds import create_engine
from actors.rollout.errors import EngineError, EngineUnavailable, ModelUnreadable, WeightsMismatch
from tests.free_ports import free_ports
from tests.rank_processes import RankProcesses
from tests.tiny_checkpoint import make_tiny_checkpoint
from tests.vllm_server import SmallServer, VllmServe

pytestmark = pytest.mark.asyncio(loop_scope="module")

CONTEXT_TOKENS = 96
VOCAB = 100
KINDS = {
    "torch-fused": ("torch", {"decoder": "fused", "tokens_per_step": 1}),
    "torch-generic": ("torch", {"decoder": "generic", "tokens_per_step": 1}),
    "torch-3-tokens-a-step": ("torch", {"tokens_per_step": 3}),
    "torch-timed-steps": ("torch", {"step_ms": 1e-6}),
    "torch-fused-cuda": ("torch", {"decoder": "fused", "tokens_per_step": 1}),
    "torch-generic-cuda": ("torch", {"decoder": "generic", "tokens_per_step": 1}),
    "torch-fused-adapter": ("torch", {"decoder": "fused", "tokens_per_step": 1}),
    "torch-generic-adapter": ("torch", {"decoder": "generic", "tokens_per_step": 1}),
    "simulated": ("simulated", {"vocab": VOCAB, "base_s": 0.0, "decode_s": 0.0, "prefill_s": 0.0, "load_s": 0.0}),
    "vllm": ("vllm", {"step_ms": 0}),
    "vllm-adapter": ("vllm", {"step_ms": 0}),
    "vllm-2-ranks": ("vllm", {"step_ms": 0}),
    "vllm-2-ranks-adapter": ("vllm", {"step_ms": 0}),
    "torch-fused-adapter-cuda": ("torch", {"decoder": "fused", "tokens_per_step": 1}),
    "torch-generic-adapter-cuda": ("torch", {"decoder": "generic", "tokens_per_step": 1}),
    "vllm-cuda": ("vllm", {"step_ms": 0}),
    "vllm-adapter-cuda": ("vllm", {"step_ms": 0}),
    "server": ("server", {}),
    "server-reload": ("server", {}),
    "server-vllm": ("server", {}),
    "server-vllm-cuda": ("server", {}),
}
ADAPTER = AdapterSpec(rank=4, alpha=8.0)
Weights = Callable[..., tuple[dict[str, np.ndarray], dict[str, str]]]
MARKS = (
    ("-cuda", pytest.mark.gpu),
    ("-ranks", pytest.mark.long),
    ("server-vllm", pytest.mark.long),
    ("server-vllm", pytest.mark.timeout(400)),
)
WORLDS = [pytest.param(kind, marks=[mark for part, mark in MARKS if part in kind]) for kind in KINDS]


@dataclass
class Sample:
    """Everything that an engine said about one request."""

    tokens: list[int] = field(default_factory=list[int])
    logprobs: list[float] = field(default_factory=list[float])
    versions: list[int] = field(default_factory=list[int])
    first_offset: int = -1
    finished: FinishReason = FinishReason.RUNNING
    rows_after_end: int = 0


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_checkpoint(tmp_path_factory.mktemp("model"), vocab=VOCAB, hidden=64, heads=2, kv_heads=1)


@pytest.fixture(scope="module", params=WORLDS)
def world(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def weights(world: str, checkpoint: Path) -> Weights:
    """Those of the checkpoint, or with ``shift`` others."""
    return partial(adapter_weights_of if "-adapter" in world else weights_of, checkpoint)


@asynccontextmanager
async def serving(world: str, checkpoint: Path, directory: Path) -> AsyncIterator[str]:
    """The address of a server of that kind."""
    if "vllm" in world:
        serve = VllmServe(directory, checkpoint, free_ports(1), context_tokens=CONTEXT_TOKENS)
        serve.start()
        try:
            await serve.ready()
            yield serve.url
        finally:
            serve.kill()
    else:
        server = SmallServer(checkpoint, extension=world == "server")
        await server.start()
        yield server.url
        await server.stop()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def started(
    world: str, checkpoint: Path, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[RolloutEngine]:
    """One engine of each kind: vLLM takes seconds to start."""
    kind, options = KINDS[world]
    if "vllm" in world and importlib.util.find_spec("vllm") is None and os.environ.get("HEADRACE_REQUIRE_VLLM") != "1":
        pytest.skip("vllm is not installed (make vllm); set HEADRACE_REQUIRE_VLLM=1 to fail instead")
    if kind == "server":
        async with serving(world, checkpoint, tmp_path_factory.mktemp("server")) as url:
            made = create_engine(kind)
            own = {"url": url, "answer_s": 30.0, "start_s": 5.0, "load_s": 60.0, "step_ms": 0}
            await made.start(
                EngineSpec(model_path=checkpoint, max_running=6, max_context_tokens=CONTEXT_TOKENS, options=own)
            )
            yield made
            await made.close()
        return
    ranks = RankProcesses(kind, 2) if "-ranks" in world else None
    made = create_engine(kind, ranks and ranks.followers())
    device, adapter = "cuda" if world.endswith("-cuda") else "cpu", ADAPTER if "-adapter" in world else None
    spec = EngineSpec(
        model_path=checkpoint, device=device, max_running=6, max_context_tokens=CONTEXT_TOKENS, options=options,
        adapter=adapter, tensor_parallel=2 if ranks else 1,
    )  # fmt: skip
    try:
        await made.start(spec)
        yield made
        await made.close()
    finally:
        if ranks is not None:
            ranks.close()


@pytest_asyncio.fixture(loop_scope="module")
async def engine(started: RolloutEngine, weights: Weights) -> RolloutEngine:
    """Empty, with the weights of the checkpoint as version 0."""
    started.abort(range(100))
    while started.has_work:
        await started.step()
    if started.policy_version != 0:
        await started.load_weights(*weights(), 0, in_flight="recompute")
    return started


def ask(
    request: int, *, prompt: int = 0, sibling: int = 0, ids: Sequence[int] | None = None, generated: Sequence[int] = (),
    max_tokens: int = 8, temperature: float = 1.0, stops: tuple[int, ...] = (), seed: int = 7,
    top_k: int = 0, top_p: float = 1.0, first: int = 0, limit: int = 0,
) -> GenerationRequest:  # fmt: skip
    if ids is None:
        ids = [3 + (prompt * 11 + i) % 90 for i in range(5 + prompt % 4)]
    sampling = SamplingParams(
        max_tokens=max_tokens, temperature=temperature, stop_token_ids=stops, seed=seed, top_k=top_k, top_p=top_p
    )
    return GenerationRequest(
        request=request, prompt=prompt, sibling=sibling, prompt_ids=np.array(ids, np.int32),
        generated=np.array(generated, np.int32), sampling=sampling, first=first, limit=limit,
    )  # fmt: skip


def record(output: StepOutput, into: dict[int, Sample]) -> None:
    assert len(output.requests) == len(output.offsets) == len(output.counts) == len(output.finished)
    assert output.counts.sum() == len(output.tokens) == len(output.logprobs)
    start = 0
    for request, offset, count, finished in zip(
        output.requests, output.offsets, output.counts, output.finished, strict=True
    ):
        sample = into.setdefault(int(request), Sample())
        sample.rows_after_end += sample.finished != FinishReason.RUNNING
        if sample.first_offset < 0:
            sample.first_offset = int(offset)
        assert offset == sample.first_offset + len(sample.tokens), "a repeat or a gap"
        sample.tokens += output.tokens[start : start + count].tolist()
        sample.logprobs += output.logprobs[start : start + count].tolist()
        sample.versions += [output.policy_version] * count
        sample.finished = FinishReason(finished)
        start += count


def as_continued(engine: RolloutEngine) -> float:
    """The temperature at which a sample that is continued says what it would have said: a server's noise moves."""
    return 0.0 if engine.kind == "server" else 1.0


async def finish(engine: RolloutEngine, into: dict[int, Sample] | None = None) -> dict[int, Sample]:
    samples: dict[int, Sample] = {} if into is None else into
    for _ in range(500):
        if not engine.has_work:
            assert all(sample.rows_after_end == 0 and sample.finished for sample in samples.values())
            return samples
        record(await engine.step(), samples)
    raise AssertionError("the engine does not come to an end")


def ended_in(samples: dict[int, Sample]) -> set[int]:
    """Those that have ended already: a real server makes any number of tokens before it is asked again."""
    ended = {number for number, sample in samples.items() if sample.finished}
    assert len(ended) <= 6, "no more than run at once"
    return ended


async def run(engine: RolloutEngine, *requests: GenerationRequest) -> dict[int, Sample]:
    engine.add(requests)
    return await finish(engine)


async def test_it_decodes_as_many_sequences_together_as_the_job_says(engine: RolloutEngine) -> None:
    assert engine.slots == 6


async def test_every_request_ends_once_within_its_budget_also_with_more_requests_than_slots(
    engine: RolloutEngine,
) -> None:
    samples = await run(engine, *(ask(n, prompt=n // 4, sibling=n % 4, max_tokens=1 + n % 9) for n in range(20)))
    assert {n: (len(s.tokens), s.finished) for n, s in samples.items()} == {
        n: (1 + n % 9, FinishReason.LENGTH) for n in range(20)
    }


async def test_a_stop_token_ends_a_sample_and_is_its_last_token(engine: RolloutEngine) -> None:
    stops = tuple(range(10, 60))
    samples = await run(engine, *(ask(n, sibling=n, stops=stops, max_tokens=60) for n in range(6)))
    ended = [sample for sample in samples.values() if sample.finished == FinishReason.STOP]
    assert ended
    assert all(s.tokens[-1] in stops and not set(s.tokens[:-1]) & set(stops) for s in ended)


async def test_the_models_own_end_token_stops_only_where_it_is_among_the_stop_tokens(engine: RolloutEngine) -> None:
    warmest = 2.0 if engine.kind == "server" else 3.0
    samples = await run(engine, *(ask(n, sibling=n, max_tokens=80, temperature=warmest) for n in range(6)))
    assert all(len(sample.tokens) == 80 and sample.finished == FinishReason.LENGTH for sample in samples.values())


async def test_equal_requests_give_equal_samples_and_siblings_differ(engine: RolloutEngine) -> None:
    first = await run(engine, *(ask(n, sibling=n, max_tokens=16) for n in range(4)))
    second = await run(engine, *(ask(10 + n, sibling=n, max_tokens=16) for n in range(4)))
    assert [first[n].tokens for n in range(4)] == [second[10 + n].tokens for n in range(4)]
    assert len({tuple(sample.tokens) for sample in first.values()}) == 4


async def test_a_moved_sample_goes_on_with_the_tokens_that_it_would_have_produced(engine: RolloutEngine) -> None:
    warm = as_continued(engine)
    whole = (await run(engine, ask(0, prompt=3, sibling=2, max_tokens=20, temperature=warm)))[0]
    moved = ask(1, prompt=3, sibling=2, max_tokens=20, generated=whole.tokens[:9], temperature=warm)
    moved = (await run(engine, moved, ask(2, prompt=1)))[1]
    assert moved.first_offset == 9
    assert moved.tokens == whole.tokens[9:]
    np.testing.assert_allclose(moved.logprobs, whole.logprobs[9:], atol=1e-4)


ASKED, SAID, ANSWERED = [11, 12, 13, 14], [21, 22, 23, 42], [31, 32, 42]
"""A context of an episode: what its environment asked, the model's first turn, and the environment again."""


async def test_a_turn_of_an_episode_is_counted_from_the_beginning_of_its_row(engine: RolloutEngine) -> None:
    turn = ask(0, ids=ASKED, generated=[*SAID, *ANSWERED], first=30, limit=42, max_tokens=5)
    said = (await run(engine, turn))[0]
    assert said.first_offset == 37 and len(said.tokens) == 5 and said.finished == FinishReason.LENGTH


async def test_a_stop_token_of_the_environment_ends_no_turn_and_one_of_the_model_does(engine: RolloutEngine) -> None:
    stops = tuple(range(30, 60))
    samples = await run(
        engine,
        *(ask(n, sibling=n, ids=ASKED, generated=[*SAID, *ANSWERED], first=4, limit=64, stops=stops) for n in range(6)),
    )
    assert all(sample.tokens for sample in samples.values())
    ended = [sample for sample in samples.values() if sample.finished == FinishReason.STOP]
    assert ended
    assert all(sample.tokens[-1] in stops and not set(sample.tokens[:-1]) & set(stops) for sample in ended)


async def test_a_turn_goes_on_with_the_tokens_that_it_would_have_had_and_so_does_a_fresh_context(
    engine: RolloutEngine,
) -> None:
    """Whatever is called the prompt of it: noise belongs to positions."""
    warm = as_continued(engine)
    whole = (await run(engine, ask(0, ids=ASKED, generated=SAID, first=9, limit=27)))[0]
    cold = (await run(engine, ask(0, ids=ASKED, generated=SAID, first=9, limit=27, temperature=warm)))[0]
    assert len(whole.tokens) == 14
    moved, all_prompt, elsewhere = (
        ask(1, ids=ASKED, generated=[*SAID, *cold.tokens[:6]], first=9, limit=27, temperature=warm),
        ask(2, ids=[*ASKED, *SAID], first=13, limit=27),
        ask(3, ids=ASKED, generated=SAID, first=50, limit=68),
    )
    samples = await run(engine, moved, all_prompt, elsewhere)
    assert samples[1].tokens == cold.tokens[6:] and samples[1].first_offset == 19
    assert samples[3].tokens != whole.tokens, "the same context at another position has other noise"
    assert samples[2].tokens == whole.tokens
    np.testing.assert_allclose(samples[2].logprobs, whole.logprobs, atol=1e-4)


async def test_siblings_with_contexts_of_their_own_say_what_each_says_alone(engine: RolloutEngine) -> None:
    asked = [ask(n, sibling=n, ids=[*ASKED, 50 + n], generated=SAID[:n], first=5, limit=15) for n in range(4)]
    alone = [(await run(engine, one))[one.request].tokens for one in asked]
    together = await run(engine, *asked)
    assert [together[n].tokens for n in range(4)] == alone


async def test_an_aborted_turn_ends_where_it_was(engine: RolloutEngine) -> None:
    engine.add([ask(n, sibling=n, ids=ASKED, generated=SAID, first=20, limit=44) for n in range(8)])
    samples: dict[int, Sample] = {}
    record(await engine.step(), samples)
    ended = ended_in(samples)
    engine.abort([0, 7])  # running, waiting
    await finish(engine, samples)
    assert samples[7].first_offset == 24 and samples[0].first_offset == 24
    assert {n for n, s in samples.items() if s.finished == FinishReason.ABORTED} == {0, 7} - ended


async def test_what_the_ledger_already_holds_can_end_a_sample(engine: RolloutEngine) -> None:
    stopped = ask(0, generated=[5, 42], stops=(42,))
    spent = ask(1, generated=[5, 6, 7], max_tokens=3)
    too_long = ask(2, ids=[5] * (CONTEXT_TOKENS + 10))
    samples = await run(engine, stopped, spent, too_long)
    assert {n: s.finished for n, s in samples.items()} == {
        0: FinishReason.STOP,
        1: FinishReason.LENGTH,
        2: FinishReason.LENGTH,
    }
    assert [samples[n].first_offset for n in range(3)] == [2, 3, 0]
    assert not any(sample.tokens for sample in samples.values())


async def test_a_sample_ends_where_the_context_is_full(engine: RolloutEngine) -> None:
    sample = (await run(engine, ask(0, ids=[5] * (CONTEXT_TOKENS - 7), max_tokens=50)))[0]
    assert (len(sample.tokens), sample.finished) == (7, FinishReason.LENGTH)


async def test_an_aborted_request_ends_once_and_unknown_ones_are_ignored(engine: RolloutEngine) -> None:
    engine.add([ask(n, sibling=n, max_tokens=30) for n in range(9)])
    samples: dict[int, Sample] = {}
    record(await engine.step(), samples)
    ended = ended_in(samples)
    engine.abort([0, 4, 8, 77])  # running, running, waiting, unknown
    await finish(engine, samples)
    assert {n for n, s in samples.items() if s.finished == FinishReason.ABORTED} == {0, 4, 8} - ended
    assert all(len(samples[n].tokens) == 30 for n in (1, 2, 3, 5, 6, 7))
    engine.abort([0, 1])
    assert not engine.has_work


async def test_an_aborted_sample_can_be_resumed_where_it_was_cut(engine: RolloutEngine) -> None:
    asked = partial(ask, max_tokens=20, temperature=as_continued(engine))
    whole = (await run(engine, asked(0)))[0]
    engine.add([asked(1)])
    cut: dict[int, Sample] = {}
    record(await engine.step(), cut)
    engine.abort([1])
    await finish(engine, cut)
    rest = (await run(engine, asked(2, generated=cut[1].tokens)))[2]
    assert cut[1].tokens + rest.tokens == whole.tokens


async def test_statistics_count_what_runs_what_waits_and_every_token(engine: RolloutEngine) -> None:
    before = engine.stats().tokens_total
    engine.add([ask(n, sibling=n, max_tokens=60) for n in range(10)])
    await engine.step()
    stats = engine.stats()
    assert (stats.running, stats.queued) == (6, 4)
    assert 0 < stats.kv_used_fraction <= 1
    await finish(engine)
    stats = engine.stats()
    assert (stats.running, stats.queued, stats.tokens_total - before) == (0, 0, 600)


SYSTEM = [3 + (7 * i) % 90 for i in range(66)]
WITHOUT_PREFIX_FIGURES = ("simulated", "server")
"""Kinds that count every token of what begins as computed."""


async def prefilled_by(engine: RolloutEngine, *requests: GenerationRequest) -> tuple[dict[int, Sample], int, int]:
    """What they say, how many tokens were computed as they began, and how many were at hand."""
    before = engine.stats()
    samples, after = await run(engine, *requests), engine.stats()
    computed = after.prefilled_tokens_total - before.prefilled_tokens_total
    return samples, computed, after.prefix_hit_tokens_total - before.prefix_hit_tokens_total


async def test_prefilled_tokens_and_those_that_were_at_hand_are_together_those_of_all_that_began(
    engine: RolloutEngine,
) -> None:
    siblings = [ask(n, sibling=n, ids=SYSTEM, generated=[9] * (n > 5), max_tokens=4) for n in range(8)]
    _, computed, spared = await prefilled_by(engine, *siblings)
    assert computed + spared == 8 * 66 + 2
    if engine.kind in WITHOUT_PREFIX_FIGURES:
        assert spared == 0
    else:
        assert computed <= 66 + 7 * 34, "once, and of further ones no more than what is no whole block"


async def test_what_begins_with_what_others_began_with_says_what_it_says_alone_and_is_computed_once(
    engine: RolloutEngine, weights: Weights
) -> None:
    """Alone: each first with weights that have just been loaded, so that nothing is at hand."""
    asked = [ask(n, prompt=n, ids=[*SYSTEM, *range(3 + n, 12 + 2 * n)], max_tokens=9) for n in range(4)]
    asked += [ask(4 + n, prompt=n, ids=asked[n].prompt_ids.tolist(), generated=[7, 8, 9], max_tokens=9) for n in (0, 2)]
    alone: dict[int, Sample] = {}
    for request in asked:
        await engine.load_weights(*weights(), 0, in_flight="keep")
        said, computed, spared = await prefilled_by(engine, request)
        assert (computed, spared) == (len(request.prompt_ids) + len(request.generated), 0)
        alone |= said
    await engine.load_weights(*weights(), 0, in_flight="recompute")
    together, computed, spared = await prefilled_by(engine, *asked)
    assert {n: sample.tokens for n, sample in together.items()} == {n: sample.tokens for n, sample in alone.items()}
    for n, sample in together.items():
        np.testing.assert_allclose(sample.logprobs, alone[n].logprobs, atol=1e-4)
    assert spared >= (0 if engine.kind in WITHOUT_PREFIX_FIGURES else 5 * 60), f"{computed} were computed"


def weights_of(checkpoint: Path, *, shift: float = 0.0) -> tuple[dict[str, np.ndarray], dict[str, str]]:
    from safetensors.numpy import load_file

    generator = np.random.default_rng(5)
    tensors = {
        name: (array + shift * generator.standard_normal(array.shape)).astype(array.dtype)
        for name, array in load_file(checkpoint / "model.safetensors").items()
    }
    for array in tensors.values():
        array.flags.writeable = False  # as a mapped segment is
    return tensors, {name: str(array.dtype) for name, array in tensors.items()}


def adapter_weights_of(checkpoint: Path, *, shift: float = 0.0) -> tuple[dict[str, np.ndarray], dict[str, str]]:
    generator, tensors = np.random.default_rng(5), dict[str, np.ndarray]()
    for name, array in weights_of(checkpoint)[0].items():
        if array.ndim == 2 and "embed" not in name:
            a, b = tensor_names(name.removesuffix(".weight"))
            tensors[a] = generator.standard_normal((ADAPTER.rank, array.shape[1])).astype(np.float32)
            tensors[b] = shift / 8 * generator.standard_normal((array.shape[0], ADAPTER.rank)).astype(np.float32)
    return tensors, dict.fromkeys(tensors, "float32")


@pytest.mark.parametrize("in_flight", ["keep", "recompute"])
async def test_a_new_version_takes_effect_between_steps_and_rows_say_which_version_made_them(
    engine: RolloutEngine, world: str, weights: Weights, in_flight: str
) -> None:
    engine.add([ask(0, max_tokens=12), ask(1, prompt=1, max_tokens=12)])
    samples: dict[int, Sample] = {}
    record(await engine.step(), samples)
    done = len(samples[0].tokens)
    if in_flight == "keep" and engine.kind == "vllm" and "-adapter" in world:  # the job file refuses it too
        with pytest.raises(EngineError, match="use recompute"):
            await engine.load_weights(*weights(shift=0.2), 5, in_flight="keep")
        return
    await engine.load_weights(*weights(shift=0.2), 5, in_flight=in_flight)  # type: ignore[arg-type]
    assert engine.policy_version == 5
    await finish(engine, samples)
    assert samples[0].versions == [0] * done + [5] * (12 - done)


async def test_a_load_that_does_not_fit_changes_nothing(engine: RolloutEngine, weights: Weights) -> None:
    tensors, dtypes = weights()
    await engine.load_weights(tensors, dtypes, 1, in_flight="recompute")
    before = await run(engine, *(ask(n, prompt=n) for n in range(3)))
    other, _ = weights(shift=1.0)
    name = max(other)
    wrong_shape = other | {name: np.zeros((3, 3), np.float32)}
    missing = {key: value for key, value in other.items() if key != name}
    for wrong in (wrong_shape, missing, other | {"model.no_such.weight": np.zeros(3, np.float32)}):
        with pytest.raises(WeightsMismatch):
            await engine.load_weights(wrong, dict.fromkeys(wrong, "float32"), 2, in_flight="recompute")
    assert engine.policy_version == 1
    after = await run(engine, *(ask(10 + n, prompt=n) for n in range(3)))
    assert [after[10 + n].tokens for n in range(3)] == [before[n].tokens for n in range(3)]


@pytest.mark.parametrize("level", [1, 2])
async def test_sequences_survive_sleep_and_level_2_demands_a_load(
    engine: RolloutEngine, weights: Weights, level: int
) -> None:
    warm = as_continued(engine)
    whole = (await run(engine, ask(0, max_tokens=12, temperature=warm)))[0]
    engine.add([ask(1, max_tokens=12, temperature=warm)])
    samples: dict[int, Sample] = {}
    record(await engine.step(), samples)
    await engine.sleep(level)
    await engine.wake()
    if level == 2:
        with pytest.raises(EngineError):
            await engine.step()
        await engine.load_weights(*weights(), 0, in_flight="recompute")
    await finish(engine, samples)
    assert samples[1].tokens == whole.tokens


async def test_greedy_tokens_are_those_of_transformers_generate(engine: RolloutEngine, checkpoint: Path) -> None:
    if engine.kind == "simulated":
        pytest.skip("the simulated engine has no model")
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(checkpoint)
    requests = [ask(n, prompt=n, temperature=0.0, max_tokens=24) for n in range(5)]
    samples = await run(engine, *requests)
    for request in requests:
        ids = torch.from_numpy(request.prompt_ids.astype(np.int64))[None]
        with torch.inference_mode():
            out = model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                do_sample=False,
                max_new_tokens=24,
                eos_token_id=-1,
                pad_token_id=0,
            )
            expected = out[0, ids.shape[1] :].tolist()
            logits = model(out).logits[0, ids.shape[1] - 1 : -1].log_softmax(-1)
        assert samples[request.request].tokens == expected
        logprobs = logits.gather(-1, torch.tensor(expected)[:, None])[:, 0].numpy()
        np.testing.assert_allclose(samples[request.request].logprobs, logprobs, atol=1e-4)


@pytest.mark.parametrize(
    ("temperature", "top_k", "top_p"), [(1.0, 0, 1.0), (0.7, 0, 1.0), (1.3, 5, 1.0), (1.0, 0, 0.6), (0.8, 12, 0.9)]
)
async def test_logprobs_are_of_the_distribution_that_was_sampled(
    engine: RolloutEngine, checkpoint: Path, temperature: float, top_k: int, top_p: float
) -> None:
    if engine.kind == "simulated":
        pytest.skip("the simulated engine has no model")
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(checkpoint)
    requests = [ask(n, prompt=n, temperature=temperature, top_k=top_k, top_p=top_p, max_tokens=16) for n in range(4)]
    samples = await run(engine, *requests)
    for request in requests:
        sample = samples[request.request]
        ids = torch.tensor([request.prompt_ids.tolist() + sample.tokens])
        with torch.inference_mode():
            logits = model(ids).logits[0, len(request.prompt_ids) - 1 : -1].double() / temperature
        for row, token, logprob in zip(logits, sample.tokens, sample.logprobs, strict=True):
            kept = row
            if top_k:
                kept = torch.where(row >= row.topk(top_k).values[-1], row, -torch.inf)
            if top_p < 1:
                probabilities, order = kept.softmax(-1).sort(descending=True)
                outside = probabilities.cumsum(-1) - probabilities >= top_p
                kept = kept.index_fill(0, order[outside], -torch.inf)
            assert abs(float(kept.log_softmax(-1)[token]) - logprob) < 1e-4


async def test_an_unknown_kind_and_a_missing_checkpoint_are_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(EngineUnavailable, match=r"'warp'.*torch, vllm, simulated"):
        create_engine("warp")
    engine = create_engine("torch")
    with pytest.raises(ModelUnreadable, match=r"config\.json"):
        await engine.start(EngineSpec(model_path=tmp_path / "nothing"))
    await engine.close()


async def test_after_recompute_running_samples_go_on_as_if_the_new_version_had_read_them_from_the_start(
    engine: RolloutEngine, weights: Weights
) -> None:
    if engine.kind == "simulated":
        pytest.skip("the simulated engine has no model")
    engine.add([ask(n, prompt=n, max_tokens=14) for n in range(3)])
    samples: dict[int, Sample] = {}
    while len(samples) < 3:  # a server's step is what has arrived
        record(await engine.step(), samples)
    done = [list(samples[n].tokens) for n in range(3)]
    await engine.load_weights(*weights(shift=0.3), 1, in_flight="recompute")
    await finish(engine, samples)
    fresh = await run(engine, *(ask(10 + n, prompt=n, max_tokens=14, generated=done[n]) for n in range(3)))
    for n in range(3):
        assert done[n] + fresh[10 + n].tokens == samples[n].tokens
        np.testing.assert_allclose(samples[n].logprobs[len(done[n]) :], fresh[10 + n].logprobs, atol=1e-4)
