"""Models that a program trains in its own process: the numbers are those of the client over HTTP."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import headrace
from tests.tiny_checkpoint import make_tiny_checkpoint

TEXTS = ([5, 6, 7, 8, 9], [10, 11, 12], [13, 14, 15, 16])
STEPS = 4


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_checkpoint(tmp_path_factory.mktemp("base"))


@pytest.fixture(scope="module")
def server(base: Path) -> Iterator[headrace.LocalServer]:
    with headrace.serve({"base": base}) as server:
        yield server


def text(number: int) -> Any:
    return headrace.datum(TEXTS[number % 3][:-1], TEXTS[number % 3][1:])


def by_python(server: headrace.LocalServer) -> list[object]:
    model = server.create_model("base", rank=8, seed=3)
    told: list[object] = []
    for number in range(STEPS):
        answer = model.forward_backward([text(number), text(1)], "cross_entropy")
        told += [answer.metrics["loss:sum"], *(one.tolist() for one in answer.logprobs)]
        model.optim_step(2e-2)
    sampler = model.sampler()
    told.append([one.tokens.tolist() for one in sampler.sample(TEXTS[0], 2, max_tokens=6, seed=1)])
    told.append(sampler.logprobs(TEXTS[0])[1:].tolist())
    return told


def by_client(variables: dict[str, str]) -> list[object]:
    import tinker

    service = tinker.ServiceClient(base_url=variables["TINKER_BASE_URL"], api_key=variables["TINKER_API_KEY"])
    model = service.create_lora_training_client(base_model="base", rank=8, seed=3).result()

    def datum(number: int) -> Any:
        tokens = TEXTS[number % 3]
        inputs = {"target_tokens": tokens[1:], "weights": [1.0] * (len(tokens) - 1)}
        return tinker.Datum(model_input=tinker.ModelInput.from_ints(tokens[:-1]), loss_fn_inputs=inputs)

    told: list[object] = []
    for number in range(STEPS):
        answer = model.forward_backward([datum(number), datum(1)], "cross_entropy").result()
        told += [answer.metrics["loss:sum"], *(one["logprobs"].tolist() for one in answer.loss_fn_outputs)]
        model.optim_step(tinker.AdamParams(learning_rate=2e-2)).result()
    sampling = model.save_weights_and_get_sampling_client().result()
    prompt, parameters = tinker.ModelInput.from_ints(TEXTS[0]), tinker.SamplingParams(max_tokens=6, seed=1)
    answer = sampling.sample(prompt=prompt, num_samples=2, sampling_params=parameters).result()
    told.append([one.tokens for one in answer.sequences])
    told.append(sampling.compute_logprobs(prompt).result()[1:])
    service.close("success").result()
    return told


@pytest.mark.filterwarnings("ignore")  # the client warns of its own next versions
async def test_the_numbers_are_those_of_the_client_over_http(
    server: headrace.LocalServer, base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("tinker")
    from tests.supervisors.serving.served_here import served_here

    monkeypatch.setenv("TINKER_TELEMETRY", "0")
    async with served_here({"base": base}, tmp_path) as variables:
        expected = await asyncio.to_thread(by_client, variables)
    told = by_python(server)
    assert told == expected
    assert told[0] > told[-5], "it learns"


def test_what_was_saved_is_there_for_a_later_server_with_its_optimizer(base: Path, tmp_path: Path) -> None:
    def step(model: headrace.Model) -> list[float]:
        model.forward_backward([text(0)], "cross_entropy")
        model.optim_step(1e-2)
        return model.forward_backward([text(0)], "cross_entropy", forward_only=True).logprobs[0].tolist()

    with headrace.serve({"base": base}, tmp_path / "kept") as first:
        model = first.create_model("base", rank=4)
        step(model)
        path = model.save("once")
        assert (model.export("adapter") / "adapter_config.json").is_file()
        expected = step(model)
    with headrace.serve({"base": base}, tmp_path / "kept") as second:
        assert step(second.load_model(path)) == expected
        assert step(second.load_model(path, optimizer=False)) != expected
        untouched = second.sampler("base").logprobs(TEXTS[0])
        assert np.isnan(untouched[0]) and np.isfinite(untouched[1:]).all()


def test_what_cannot_be_done_is_refused_in_a_sentence_and_the_next_call_goes_on(server: headrace.LocalServer) -> None:
    model = server.create_model("base", rank=4)
    before = model.forward_backward([text(0)], "cross_entropy", forward_only=True).logprobs[0]
    for wrong, said in (
        (lambda: server.create_model("other"), "'other' is not served here"),
        (lambda: server.load_model("tinker://nobody/weights/x"), "no weights of yours"),
        (lambda: server.sampler("other"), "'other' is not served here"),
        (lambda: model.forward_backward([headrace.datum([1, 200], [1, 2])], "cross_entropy"), "token 200"),
        (lambda: model.forward_backward([text(0)], "stable_reinforce"), "expected one of cross_entropy"),
        (lambda: model.forward_backward([text(0)], "ppo"), "logprobs: missing"),
        (lambda: model.optim_step(float("nan")), "learning_rate"),
        (lambda: model.save("a/b"), "no name for weights"),
        (lambda: model.sampler().sample([1, 2], max_tokens=0), "max_tokens is 0"),
    ):
        with pytest.raises(headrace.ModelRefused, match=said):
            wrong()
    after = model.forward_backward([text(0)], "cross_entropy", forward_only=True).logprobs[0]
    assert (before == after).all()


@pytest.mark.long
def test_the_client_package_is_not_needed(base: Path) -> None:
    code = "import sys; sys.modules['tinker'] = None; import headrace; headrace.serve({'base': sys.argv[1]}).close()"
    subprocess.run([sys.executable, "-c", code, str(base)], check=True, timeout=60)
