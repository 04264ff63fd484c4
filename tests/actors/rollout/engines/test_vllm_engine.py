"""The vLLM engine against transformers, on the real thing. One engine serves the whole module; tests leave it empty."""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import os
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from actors.protocol.tokens import FinishReason
from actors.protocol.work import SamplingParams
from actors.rollout.engine import EngineSpec, GenerationRequest
from actors.rollout.errors import EngineError, EngineUnavailable, ModelUnreadable, RequestRefused, WeightsMismatch
from tests.tiny_checkpoint import make_tiny_checkpoint

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(240)]

if importlib.util.find_spec("vllm") is None and os.environ.get("HEADRACE_REQUIRE_VLLM") != "1":
    pytest.skip(
        "vLLM is not installed; `make vllm` adds it, HEADRACE_REQUIRE_VLLM=1 makes this a failure",
        allow_module_level=True,
    )

from actors.rollout.engines.vllm.engine import VllmEngine

SHAPE: dict[str, Any] = {"hidden": 64, "heads": 2, "kv_heads": 1, "layers": 2}
"""Heads of 32: vLLM's attention on a CPU has no kernel for smaller ones."""
PROMPT = np.arange(5, 45, dtype=np.int32)


def sampling(**changes: Any) -> SamplingParams:
    return SamplingParams(**({"max_tokens": 16, "temperature": 1.0, "seed": 7} | changes))


def request(
    number: int,
    *,
    prompt_ids: np.ndarray = PROMPT,
    generated: Sequence[int] = (),
    prompt: int = 0,
    sibling: int = 0,
    **changes: Any,
) -> GenerationRequest:
    return GenerationRequest(
        request=number,
        prompt=prompt,
        sibling=sibling,
        prompt_ids=prompt_ids,
        generated=np.array(generated, np.int32),
        sampling=sampling(**changes),
    )


@dataclass
class Response:
    """All rows of one request, put together and checked for gaps."""

    offset: int
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    finished: int = FinishReason.RUNNING


class Harness:
    """Drives one engine from plain code, on a loop of its own, as a worker would."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self.engine = VllmEngine()
        self.responses: dict[int, Response] = {}

    def do(self, awaitable: Any) -> Any:
        return self.loop.run_until_complete(asyncio.wait_for(awaitable, 120))

    def step(self) -> None:
        output, at = self.do(self.engine.step()), 0
        for number, offset, count, finished in zip(
            output.requests, output.offsets, output.counts, output.finished, strict=True
        ):
            response = self.responses.setdefault(int(number), Response(int(offset)))
            assert response.finished == FinishReason.RUNNING, "a row after the last one"
            assert offset == response.offset + len(response.tokens), "a gap or a repeat"
            response.tokens += output.tokens[at : at + count].tolist()
            response.logprobs += output.logprobs[at : at + count].tolist()
            response.versions += [output.policy_version] * int(count)
            response.finished = int(finished)
            at += int(count)

    def add(self, *requests: GenerationRequest) -> None:
        for r in requests:
            self.responses.pop(r.request, None)
        self.engine.add(requests)

    def drain(self) -> None:
        while self.engine.has_work:
            self.step()

    def generate(self, *requests: GenerationRequest) -> list[Response]:
        self.add(*requests)
        self.drain()
        return [self.responses[r.request] for r in requests]

    def load(self, model: Any, version: int, in_flight: str = "recompute") -> None:
        tensors, dtypes = weights_of(model)
        self.do(self.engine.load_weights(tensors, dtypes, version, in_flight=in_flight))


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_checkpoint(tmp_path_factory.mktemp("vllm") / "tied", seed=1, **SHAPE)


@pytest.fixture(scope="module")
def files_before() -> set[str]:
    return set(os.listdir(tempfile.gettempdir()))


@pytest.fixture(scope="module")
def harness(checkpoint: Path, files_before: set[str]) -> Iterator[Harness]:
    harness = Harness()
    spec = EngineSpec(model_path=checkpoint, max_running=4, max_context_tokens=128, options={"step_ms": 0})
    harness.do(harness.engine.start(spec))
    yield harness
    harness.do(harness.engine.close())
    harness.loop.close()


@pytest.fixture
def served(harness: Harness, checkpoint: Path) -> Harness:
    """The engine, empty and serving the checkpoint."""
    harness.engine.abort(list(harness.responses))
    harness.drain()
    harness.responses.clear()
    if harness.engine.policy_version != 0:
        harness.load(hf_model(checkpoint), 0)
    return harness


def hf_model(path: Path) -> Any:
    import torch
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()


def other_model(checkpoint: Path, seed: int) -> Any:
    """The checkpoint's architecture with other weights."""
    import torch

    model = hf_model(checkpoint)
    torch.manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.05)
    return model


def weights_of(model: Any) -> tuple[dict[str, np.ndarray], dict[str, str]]:
    tensors = {name: parameter.detach().numpy().copy() for name, parameter in model.named_parameters()}
    return tensors, dict.fromkeys(tensors, "float32")


def hf_logprobs(model: Any, prompt: np.ndarray, tokens: Sequence[int], temperature: float = 1.0) -> np.ndarray:
    """Log-probabilities float32[n] of the response ``tokens`` behind ``prompt``."""
    import torch

    ids = torch.tensor([[*prompt.tolist(), *tokens]])
    with torch.no_grad():
        logits = model(ids).logits[0, len(prompt) - 1 : -1] / temperature
    return logits.log_softmax(-1)[torch.arange(len(tokens)), torch.tensor(list(tokens))].numpy()


def assert_logprobs(response: Response, model: Any, *, temperature: float = 1.0, prompt: np.ndarray = PROMPT) -> None:
    np.testing.assert_allclose(response.logprobs, hf_logprobs(model, prompt, response.tokens, temperature), atol=1e-3)


# ---------------------------------------------------------------- what is generated


def test_it_knows_how_many_tokens_its_cache_holds(served: Harness) -> None:
    """Room for all sequences at full length and one more: the account that ``max_running: auto`` is made of."""
    core = served.engine._live_core
    assert core.kv_tokens in range(4 * 128, 6 * 160)
    assert served.engine.slots == 4, "the job's number counts if it has one"


def test_greedy_tokens_are_those_of_transformers(served: Harness, checkpoint: Path) -> None:
    import torch

    prompts = [np.arange(5, 5 + n, dtype=np.int32) for n in (3, 17, 40)]
    responses = served.generate(
        *(request(n, prompt_ids=ids, temperature=0.0, max_tokens=24) for n, ids in enumerate(prompts))
    )
    model = hf_model(checkpoint)
    for ids, response in zip(prompts, responses, strict=True):
        expected = model.generate(
            torch.tensor([ids.tolist()]), max_new_tokens=24, do_sample=False, eos_token_id=-1, pad_token_id=0
        )
        assert response.tokens == expected[0, len(ids) :].tolist()


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_logprobs_are_of_the_sampling_distribution(served: Harness, checkpoint: Path, temperature: float) -> None:
    """VLLM's default would give them before the temperature, 0.29 off on average at 0.7."""
    model = hf_model(checkpoint)
    for response in served.generate(*(request(n, sibling=n, temperature=temperature) for n in range(4))):
        assert_logprobs(response, model, temperature=temperature)


@pytest.mark.parametrize("temperature", [0.005, 3.0])
def test_temperatures_that_vllm_would_change_or_refuse_are_used_as_asked(
    served: Harness, checkpoint: Path, temperature: float
) -> None:
    [response] = served.generate(request(1, temperature=temperature))
    np.testing.assert_allclose(
        response.logprobs, hf_logprobs(hf_model(checkpoint), PROMPT, response.tokens, temperature), atol=1e-2
    )


def test_siblings_differ_and_a_repeat_is_the_same(served: Harness) -> None:
    first = served.generate(*(request(n, sibling=n) for n in range(4)))
    again = served.generate(*(request(10 + n, sibling=n) for n in reversed(range(4))))
    assert len({tuple(r.tokens) for r in first}) == 4
    assert [r.tokens for r in reversed(again)] == [r.tokens for r in first]


def test_a_moved_sample_goes_on_with_the_tokens_it_would_have_drawn(served: Harness) -> None:
    [whole] = served.generate(request(1, sibling=3))
    [rest] = served.generate(request(2, sibling=3, generated=whole.tokens[:6]))
    assert (rest.offset, rest.tokens) == (6, whole.tokens[6:])
    np.testing.assert_allclose(rest.logprobs, whole.logprobs[6:], atol=1e-4)


def test_a_stop_token_ends_the_response_and_belongs_to_it(served: Harness) -> None:
    [free] = served.generate(request(1))
    stop = free.tokens[5]
    [stopped] = served.generate(request(2, stop_token_ids=(stop,)))
    assert stopped.finished == FinishReason.STOP
    assert stopped.tokens == free.tokens[: free.tokens.index(stop) + 1]


def test_every_budget_ends_in_length(served: Harness) -> None:
    full = np.full(128, 9, np.int32)
    short, no_room, spent, limited = served.generate(
        request(1, max_tokens=3),
        request(2, prompt_ids=full),
        request(3, generated=[4, 5], max_tokens=2),
        request(4, prompt_ids=full[:120], max_tokens=50),
    )
    assert [r.finished for r in (short, no_room, spent, limited)] == [FinishReason.LENGTH] * 4
    assert [len(r.tokens) for r in (short, no_room, spent, limited)] == [3, 0, 0, 8]
    assert spent.offset == 2


def test_a_stop_token_that_the_ledger_holds_is_honoured(served: Harness) -> None:
    [ended] = served.generate(request(1, generated=[4, 9], stop_token_ids=(9,)))
    assert (ended.finished, ended.tokens) == (FinishReason.STOP, [])


def test_many_more_prompts_than_one_step_takes_are_all_answered(served: Harness) -> None:
    """A seeded request whose prefill is cut into chunks crashes vLLM's runner on a CPU."""
    long = [np.random.default_rng(n).integers(5, 90, 110).astype(np.int32) for n in range(48)]
    responses = served.generate(*(request(n, prompt=n, prompt_ids=ids, max_tokens=2) for n, ids in enumerate(long)))
    assert [r.finished for r in responses] == [FinishReason.LENGTH] * 48


def test_a_token_outside_the_vocabulary_is_refused_and_names_the_request(served: Harness) -> None:
    with pytest.raises(RequestRefused, match=r"vocabulary is 0 … 99") as caught:
        served.add(request(1), request(2, prompt_ids=np.array([3, 100], np.int32)))
    assert caught.value.requests == (2,)
    assert not served.engine.has_work


# ---------------------------------------------------------------- abort


def test_an_aborted_sequence_ends_once_and_resumes_where_it_was(served: Harness) -> None:
    [whole] = served.generate(request(1))
    served.add(request(2), request(3, sibling=1))
    for _ in range(5):
        served.step()
    served.engine.abort([2, 99])
    served.drain()
    part = served.responses[2]
    assert part.finished == FinishReason.ABORTED
    assert part.tokens == whole.tokens[:5]
    assert served.responses[3].finished == FinishReason.LENGTH
    [rest] = served.generate(request(4, generated=part.tokens))
    assert part.tokens + rest.tokens == whole.tokens


def test_aborting_before_the_first_step_and_while_queued_gives_one_empty_row(served: Harness) -> None:
    served.add(*(request(n, sibling=n) for n in range(6)))
    served.engine.abort([0])
    served.step()
    served.engine.abort([5])  # beyond max_running: waits inside vLLM
    served.drain()
    assert [(served.responses[n].finished, served.responses[n].tokens) for n in (0, 5)] == [
        (FinishReason.ABORTED, [])
    ] * 2
    assert all(served.responses[n].finished == FinishReason.LENGTH for n in (1, 2, 3, 4))


# ---------------------------------------------------------------- weights


def test_after_a_load_logprobs_are_the_new_weights_and_rows_say_the_version(served: Harness, checkpoint: Path) -> None:
    """Tied embeddings: without repacking, the head goes on with the old ones and logprobs are off by several nats."""
    served.generate(request(1))  # fills the prefix cache under version 0
    for version, seed in ((1, 11), (2, 12)):
        model = other_model(checkpoint, seed)
        served.load(model, version)
        [response] = served.generate(request(10 + version))
        assert_logprobs(response, model)
        assert set(response.versions) == {version} == {served.engine.policy_version}


def test_recompute_prefills_running_sequences_under_the_new_weights(served: Harness, checkpoint: Path) -> None:
    old, new = hf_model(checkpoint), other_model(checkpoint, 13)
    served.add(*(request(n, sibling=n) for n in range(3)))
    for _ in range(6):
        served.step()
    served.load(new, 5, "recompute")
    served.drain()
    for response in (served.responses[n] for n in range(3)):
        assert response.versions == [0] * 6 + [5] * 10
        np.testing.assert_allclose(response.logprobs[:6], hf_logprobs(old, PROMPT, response.tokens)[:6], atol=1e-3)
        np.testing.assert_allclose(response.logprobs[6:], hf_logprobs(new, PROMPT, response.tokens)[6:], atol=1e-3)


def test_keep_leaves_running_caches_alone_and_gives_them_to_nobody_else(served: Harness, checkpoint: Path) -> None:
    """Six sequences on four places: the two that wait have computed nothing yet and must start on the new weights."""
    new = other_model(checkpoint, 14)
    served.add(*(request(n, sibling=n) for n in range(6)))
    for _ in range(6):
        served.step()
    served.load(new, 6, "keep")
    [late] = served.generate(request(9, sibling=9))
    for waiting in (served.responses[4], served.responses[5], late):
        assert set(waiting.versions) == {6}
        assert_logprobs(waiting, new)
    running = served.responses[0]
    assert running.versions == [0] * 6 + [6] * 10
    assert np.abs(np.array(running.logprobs) - hf_logprobs(new, PROMPT, running.tokens))[6:].max() > 1e-2, (
        "the old cache is in use"
    )


def broken(tensors: dict[str, np.ndarray], how: str) -> dict[str, np.ndarray]:
    name = "model.layers.1.mlp.up_proj.weight"
    if how == "torn":
        return dict(list(tensors.items())[: len(tensors) // 2])
    if how == "unknown":
        return tensors | {"model.layers.7.mlp.up_proj.weight": tensors[name]}
    if how == "shape":
        return tensors | {name: tensors[name].T.copy()}
    return tensors | {name: tensors[name].astype(np.float64)}


@pytest.mark.parametrize("how", ["torn", "unknown", "shape", "dtype"])
def test_a_mismatched_update_is_refused_and_the_engine_goes_on(served: Harness, checkpoint: Path, how: str) -> None:
    tensors, dtypes = weights_of(other_model(checkpoint, 15))
    served.add(request(1))
    served.step()
    wrong = broken(tensors, how)
    with pytest.raises(WeightsMismatch):
        served.do(served.engine.load_weights(wrong, dtypes | dict.fromkeys(wrong, "float32"), 8, in_flight="recompute"))
    served.drain()
    assert set(served.responses[1].versions) == {0}
    assert_logprobs(served.responses[1], hf_model(checkpoint))


@pytest.mark.parametrize("where", ["load_weights", "finalize"])
def test_a_load_that_fails_half_way_is_undone(
    served: Harness, checkpoint: Path, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    """VLLM leaves layers on the meta device when a reload breaks; the next step would kill it."""
    from actors.rollout.engines.vllm import weights as vllm_weights

    old, new = hf_model(checkpoint), other_model(checkpoint, 16)
    served.add(request(1))
    served.step()
    with monkeypatch.context() as patch:
        if where == "load_weights":
            whole = vllm_weights.Expected.loadable

            def half(self: Any, tensors: Any) -> Iterator[Any]:
                for n, pair in enumerate(whole(self, tensors)):
                    if n == 9:
                        raise OSError("the segment was cut off")
                    yield pair

            patch.setattr(vllm_weights.Expected, "loadable", half)
        else:

            def fail(model: Any) -> None:
                raise RuntimeError("no memory for packing")

            patch.setattr(vllm_weights, "repack_tied_heads", fail)
        with pytest.raises(WeightsMismatch, match="version 9"):
            served.load(new, 9)
    served.drain()
    assert served.engine.policy_version == 0
    assert_logprobs(served.responses[1], old)
    served.load(new, 10)
    [response] = served.generate(request(2))
    assert_logprobs(response, new)


# ---------------------------------------------------------------- memory and stats


def test_sleep_1_frees_the_cache_for_real_and_sequences_go_on_after_it(served: Harness) -> None:
    import torch

    [whole] = served.generate(request(1))
    served.add(request(2))
    served.step()
    caches = served.engine._live_core._runner.kv_caches
    size = sum(cache.untyped_storage().nbytes() for cache in caches)
    served.do(served.engine.sleep(1))
    assert size > 0 == sum(cache.untyped_storage().nbytes() for cache in caches)
    with pytest.raises(EngineError, match="asleep"):
        served.step()
    for cache in caches:  # what the system gives back holds whatever was there before; here the worst
        cache.untyped_storage().resize_(size // len(caches))
        as_floats = torch.empty(0).set_(cache.untyped_storage())
        as_floats.fill_(torch.nan)
    served.do(served.engine.wake())
    assert not any(cache.any() for cache in caches)
    served.drain()
    assert served.responses[2].tokens == whole.tokens


def test_sleep_2_drops_the_weights_and_a_load_must_follow(served: Harness, checkpoint: Path) -> None:
    served.add(request(1))
    served.step()
    served.do(served.engine.sleep(2))
    served.do(served.engine.wake())
    with pytest.raises(EngineError, match="load must succeed"):
        served.step()
    new = other_model(checkpoint, 17)
    served.load(new, 3)
    served.drain()
    np.testing.assert_allclose(
        served.responses[1].logprobs[1:], hf_logprobs(new, PROMPT, served.responses[1].tokens)[1:], atol=1e-3
    )


def test_stats_count_sequences_tokens_and_time(served: Harness) -> None:
    before = served.engine.stats()
    served.add(*(request(n, sibling=n) for n in range(6)))
    served.step()
    stats = served.engine.stats()
    assert (stats.running, stats.queued) == (4, 2)
    assert stats.tokens_total - before.tokens_total == 4
    assert stats.kv_used_fraction > 0
    assert stats.step_s > 0
    assert stats.busy_s_total > before.busy_s_total


def test_a_second_engine_in_one_process_is_refused(served: Harness, checkpoint: Path) -> None:
    with pytest.raises(EngineUnavailable, match="process-global"):
        served.do(VllmEngine().start(EngineSpec(model_path=checkpoint)))


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="threads are counted in /proc")
def test_the_groups_that_vllm_makes_have_no_threads(served: Harness) -> None:
    names: list[str] = []
    for task in Path("/proc/self/task").iterdir():
        with contextlib.suppress(OSError):  # others' threads come and go
            names.append((task / "comm").read_text().strip())
    assert names.count("gloo_tcp_loop") == 0


def test_nothing_is_left_in_the_temporary_directory(served: Harness, files_before: set[str]) -> None:
    left = {name for name in set(os.listdir(tempfile.gettempdir())) - files_before if "vllm" in name}
    assert left == set()


def test_a_step_that_goes_on_says_what_many_short_ones_say(served: Harness, monkeypatch: pytest.MonkeyPatch) -> None:
    requests = [request(n, sibling=n, max_tokens=4 + 3 * (n // 2)) for n in range(4)]
    short = served.generate(*requests)
    monkeypatch.setattr(served.engine, "_step_s", 1e6)
    served.add(*requests)
    steps = 0
    while served.engine.has_work:
        served.step()
        steps += 1
    assert steps == 2, "it goes on until something ends: two pairs end together"
    for before, now in zip(short, (served.responses[r.request] for r in requests), strict=True):
        assert (now.tokens, now.finished) == (before.tokens, before.finished)
        assert now.logprobs == pytest.approx(before.logprobs, abs=1e-4)


# ---------------------------------------------------------------- last, since they need the one engine gone


def test_an_untied_model_serves_what_is_loaded(harness: Harness, tmp_path: Path) -> None:
    harness.do(harness.engine.close())
    path = make_tiny_checkpoint(tmp_path / "untied", seed=2, tied=False, **SHAPE)
    untied = Harness()
    untied.do(untied.engine.start(EngineSpec(model_path=path, max_running=4, max_context_tokens=128)))
    try:
        for version in (1, 2):
            model = other_model(path, 20 + version)
            untied.load(model, version)
            [response] = untied.generate(request(version))
            assert_logprobs(response, model)
    finally:
        untied.do(untied.engine.close())
        untied.loop.close()


def leave_out_a_tensor(path: Path) -> None:
    from safetensors.numpy import load_file, save_file

    tensors = load_file(path)
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, path, metadata={"format": "pt"})


def test_bad_starts_say_what_is_wrong_and_leave_the_process_usable(
    harness: Harness, checkpoint: Path, tmp_path: Path
) -> None:
    harness.do(harness.engine.close())
    with pytest.raises(ModelUnreadable, match="nothing-here"):
        harness.do(VllmEngine().start(EngineSpec(model_path=tmp_path / "nothing-here")))
    with pytest.raises(ModelUnreadable, match="heads of size 8"):
        harness.do(VllmEngine().start(EngineSpec(model_path=make_tiny_checkpoint(tmp_path / "small", heads=4))))
    with pytest.raises(EngineError, match=r"engine_options\.no_such"):
        harness.do(VllmEngine().start(EngineSpec(model_path=checkpoint, options={"no_such": 1})))
    with pytest.raises(EngineUnavailable, match=r"engine_options\.speculative_config: tokens that were drafted"):
        harness.do(VllmEngine().start(EngineSpec(model_path=checkpoint, options={"speculative_config": {}})))
    with pytest.raises(EngineUnavailable, match="CUDA"):
        harness.do(VllmEngine().start(EngineSpec(model_path=checkpoint, device="cuda")))
    cut = make_tiny_checkpoint(tmp_path / "cut", **SHAPE)
    weights = cut / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:2000])
    with pytest.raises(ModelUnreadable, match="is damaged"):
        harness.do(VllmEngine().start(EngineSpec(model_path=cut)))
    missing = make_tiny_checkpoint(tmp_path / "missing", **SHAPE)
    leave_out_a_tensor(missing / "model.safetensors")
    with pytest.raises(ModelUnreadable, match=r"its weights lack \S*up_proj"):
        harness.do(VllmEngine().start(EngineSpec(model_path=missing)))
    engine = VllmEngine()
    room = {"kv_cache_memory_bytes": 8 << 20}
    harness.do(engine.start(EngineSpec(model_path=checkpoint, max_running=0, max_context_tokens=4096, options=room)))
    assert engine._live_core.context_tokens == 512
    assert engine.slots == 2 * engine._live_core.kv_tokens // 512 < 256, "by its own account"
    harness.do(engine.close())
    assert not isinstance(engine._thread, ThreadPoolExecutor)
