"""The unmodified client ``tinker`` against the server, over HTTP on this machine."""

from __future__ import annotations

import asyncio
import gc
import hashlib
import pickle
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import numpy as np
import pytest

tinker = pytest.importorskip("tinker")

from actors.host.https import server_tls
from tests.actors.tinker.http_world import HttpWorld
from tests.actors.tinker.tinker_world import BASE
from tests.certificates import make_authority

pytestmark = pytest.mark.filterwarnings("ignore")  # the client warns of its own next versions


@pytest.fixture(autouse=True)
def _quiet_client(monkeypatch):
    monkeypatch.setenv("TINKER_TELEMETRY", "0")
    monkeypatch.delenv("TINKER_PROJECT_ID", raising=False)
    yield
    gc.collect()  # sockets that the client leaves open are told of here, and not in another test


def datum(*tokens: int, **more: list[float]) -> Any:
    inputs: dict[str, Any] = {"target_tokens": list(tokens), "weights": [1.0] * len(tokens), **more}
    if more:
        del inputs["weights"]
    return tinker.Datum(model_input=tinker.ModelInput.from_ints(list(tokens)), loss_fn_inputs=inputs)


ADAM = tinker.AdamParams(learning_rate=1e-3) if hasattr(tinker, "AdamParams") else None


@asynccontextmanager
async def service_of(world: HttpWorld, tenant: str = "alice") -> AsyncIterator[Any]:
    service = await asyncio.to_thread(tinker.ServiceClient, base_url=world.url, api_key=world.key(tenant))
    yield service
    await asyncio.to_thread(lambda: service.close("success").result())


def whole_story(service: Any) -> list[object]:
    """Everything that recipes do; returns what was told."""
    told: list[object] = []
    training = service.create_lora_training_client(base_model=BASE, rank=8, seed=3).result()
    futures = []
    for number in range(10):
        data = [datum(number, 1, 2), datum(number, 3)]
        futures += [training.forward_backward(data, "cross_entropy"), training.optim_step(ADAM)]
    for future in futures:
        result = future.result()
        told += [result.metrics, *(one["logprobs"].tolist() for one in getattr(result, "loss_fn_outputs", []))]
    told.append(str(training.save_state("state").result().path).rpartition("/")[2])

    def loss(data: list[Any], logprobs: list[Any]) -> tuple[Any, dict[str, float]]:
        return sum((one**2).sum() for one in logprobs), {"mine": 1.0}

    told.append(training.forward_backward_custom([datum(4, 5)], loss).result().metrics)
    ratios = datum(1, 2, logprobs=[-1.0, -2.0], advantages=[1.0, -1.0])
    for name in ("importance_sampling", "ppo", "cispo"):
        told.append(training.forward_backward([ratios], name).result().metrics)
    with pytest.raises(tinker.RequestFailedError, match="choose loss_fn=importance_sampling"):
        training.forward_backward([ratios], "stable_reinforce").result()
    told.append(training.optim_step(ADAM).result().metrics)

    path = training.save_weights_for_sampler("end").result().path
    sampling = service.create_sampling_client(model_path=path).result()
    prompt, parameters = tinker.ModelInput.from_ints([1, 2, 3]), tinker.SamplingParams(max_tokens=4, seed=1)
    answer = sampling.sample(
        prompt=prompt, num_samples=2, sampling_params=parameters, include_prompt_logprobs=True, topk_prompt_logprobs=2
    ).result()
    told += [[one.tokens for one in answer.sequences], answer.prompt_logprobs]
    likeliest = sampling.sample(
        prompt=prompt, num_samples=1, sampling_params=parameters, topk_sample_logprobs=2
    ).result()
    assert likeliest.sequences[0].topk_logprobs == [[(0, -1.0), (1, -2.0)]] * 4
    assert answer.sequences[0].topk_logprobs is None
    told.append(sampling.compute_logprobs(prompt).result())
    newest = training.save_weights_and_get_sampling_client().result()
    told.append(newest.sample(prompt=prompt, num_samples=1, sampling_params=parameters).result().sequences[0].tokens)
    return told


async def test_a_client_trains_saves_loads_and_samples(tmp_path):
    async with HttpWorld(tmp_path) as world, service_of(world) as service:
        told = await asyncio.to_thread(whole_story, service)
        assert len(told) > 40

        def loaded() -> dict[str, float]:
            path = next(iter(world.server.service._lines)) + "/weights/state"
            training = service.create_training_client_from_state_with_optimizer(f"tinker://{path}").result()
            assert training.get_info().lora_rank == 8
            training.forward_backward([datum(1)], "cross_entropy").result()
            return training.optim_step(ADAM).result().metrics

        assert (await asyncio.to_thread(loaded))["steps"] == 11.0
        await asyncio.to_thread(lambda: service.close("success").result())
        assert world.server.service._lines == {}, "a session that is closed takes its models along"


async def test_a_sample_that_a_client_gives_up_ends_at_the_server(tmp_path):
    async with HttpWorld(tmp_path) as world, service_of(world) as service:
        gate = world.sampler_faults.gate = asyncio.Event()
        prompt, parameters = tinker.ModelInput.from_ints([1, 2, 3]), tinker.SamplingParams(max_tokens=4, seed=1)
        sampling = await asyncio.to_thread(lambda: service.create_sampling_client(base_model=BASE).result())
        futures = [sampling.sample(prompt=prompt, num_samples=1, sampling_params=parameters) for _ in range(3)]
        async with asyncio.timeout(20.0):
            while len(world.server.service._futures._polls) < 3:  # until then the client does not know what to cancel
                await asyncio.sleep(0.01)
            for future in futures[:2]:
                future.future().cancel()
            while world.sampler_faults.given_up < 2:
                await asyncio.sleep(0.01)
        gate.set()
        assert len((await asyncio.to_thread(futures[2].result)).sequences) == 1
        assert world.sampler_faults.given_up == 2


def all_in_flight(service: Any, steps: int = 6) -> str:
    """A digest of all that was told of steps of three requests each, all in flight at once."""
    training = service.create_lora_training_client(base_model=BASE, rank=8, seed=3).result()
    futures = []
    for number in range(steps):
        futures += [training.forward_backward([datum(number, part)], "cross_entropy") for part in range(3)]
        futures.append(training.optim_step(ADAM))
    metrics = [future.result().metrics for future in futures]
    assert metrics[-1] == {"steps": steps, "calls": 3 * steps}
    path = training.save_weights_for_sampler("end").result().path
    sampling = service.create_sampling_client(model_path=path).result()
    logprobs = sampling.compute_logprobs(tinker.ModelInput.from_ints([1, 2])).result()
    return hashlib.sha256(repr([metrics, logprobs]).encode()).hexdigest()


@pytest.mark.long
async def test_dropped_answers_failures_and_restarts_change_no_number(tmp_path):
    """Every request is in flight at once; 20 % of the answers are lost, 10 % become 500, the server restarts twice."""
    digests = []
    for disturbed in (False, True):
        (tmp_path / str(disturbed)).mkdir()
        async with HttpWorld(tmp_path / str(disturbed)) as world, service_of(world) as service:
            world.drawn = random.Random(1) if disturbed else None
            story = asyncio.create_task(asyncio.to_thread(all_in_flight, service))
            for _ in range(2 if disturbed else 0):
                calls = world.faults.calls
                while world.faults.calls < calls + 7 and not story.done():
                    await asyncio.sleep(0.01)
                await world.restart()
            digests.append(await story)
            assert not disturbed or world.disturbed > 3
    assert digests[0] == digests[1]


async def test_each_loss_takes_the_clients_own_messages(tmp_path):
    """And parameters of clipping; of K targets at a position each has its weight, and its log-probability."""
    ratios = datum(1, 2, logprobs=[-1.0, -2.0], advantages=[1.0, -1.0])
    masked = datum(1, 2, logprobs=[-1.0, -2.0], advantages=[1.0, -1.0], sequence_ratio_mask=[0.0, 1.0])
    many = tinker.Datum(
        model_input=tinker.ModelInput.from_ints([1, 2]),
        loss_fn_inputs={
            "target_tokens": np.array([[5, 6, 7], [8, 0, 9]], np.int64),
            "weights": np.array([[0.5, 0.0, 0.5], [-1.0, 0.0, 0.0]], np.float32),
        },
    )
    clips = {"clip_low_threshold": 0.5, "clip_high_threshold": 2.0}
    calls: list[tuple[Any, str, dict[str, float] | None]] = [
        (many, "cross_entropy", None), (ratios, "importance_sampling", None), (ratios, "ppo", clips),
        (ratios, "cispo", clips), (ratios, "dro", {"beta": 0.1}), (masked, "gspo", clips),
    ]  # fmt: skip

    def told(service: Any) -> list[Any]:
        training = service.create_lora_training_client(base_model=BASE, rank=8, seed=3).result()
        asked = [training.forward_backward([one], loss, parameters) for one, loss, parameters in calls]
        return [one.result() for one in asked]

    async with HttpWorld(tmp_path) as world, service_of(world) as service:
        (wide, *others) = await asyncio.to_thread(told, service)
        (told_logprobs,) = [one["logprobs"] for one in wide.loss_fn_outputs]
        assert told_logprobs.shape == [2, 3]
        weights = np.array([[0.5, 0.0, 0.5], [-1.0, 0.0, 0.0]])
        expected = -(np.array(told_logprobs.tolist()).reshape(2, 3) * weights).sum()
        assert wide.metrics["loss:sum"] == pytest.approx(expected)
        assert all(len(one.loss_fn_outputs[0]["logprobs"].tolist()) == 2 for one in others)
        learner = next(iter(world.server.service._lines.values()))._learner
        assert learner.state["calls"] == len(calls)


async def story_of_a_coroutine(service: Any) -> None:
    """What recipes written with ``await`` do, and what they ask of the REST client; a sampler travels as a pickle."""
    training = await service.create_lora_training_client(base_model=BASE, rank=8, user_metadata={"renderer": "x"})
    asked = training.forward_backward([datum(1, 2)], "cross_entropy")
    stepped = training.optim_step(ADAM)
    assert "loss:sum" in (await asked).metrics
    assert (await stepped).metrics["steps"] == 1.0
    saved = (await training.save_state("state")).path

    rest = service.create_rest_client()
    run = await rest.get_training_run_by_tinker_path(saved)
    assert (run.base_model, run.lora_rank, run.user_metadata) == (BASE, 8, {"renderer": "x"})
    assert (await rest.get_weights_info_by_tinker_path(saved)).base_model == BASE
    assert [one.model_name for one in (await service.get_server_capabilities_async()).supported_models] == [BASE]

    fresh = await service.create_training_client_from_state(saved)
    assert (await fresh.optim_step(ADAM)).metrics == {"steps": 1.0, "calls": 0.0}, "the optimizer began anew"
    await fresh.load_state_with_optimizer(saved)
    assert (await fresh.optim_step(ADAM)).metrics == {"steps": 2.0, "calls": 1.0}

    newest = await training.save_weights_and_get_sampling_client()
    prompt, parameters = tinker.ModelInput.from_ints([1, 2, 3]), tinker.SamplingParams(max_tokens=4, seed=1)
    answer = await newest.sample(prompt=prompt, num_samples=1, sampling_params=parameters)
    assert (await rest.get_sampler(newest._sampling_session_id)).base_model == BASE
    elsewhere = pickle.loads(pickle.dumps(newest))
    again = await elsewhere.sample(prompt=prompt, num_samples=1, sampling_params=parameters)
    assert again.sequences[0].tokens == answer.sequences[0].tokens


async def test_a_coroutine_saves_loads_without_the_optimizer_and_looks_up_what_it_saved(tmp_path):
    async with HttpWorld(tmp_path) as world, service_of(world) as service:
        await asyncio.to_thread(asyncio.run, story_of_a_coroutine(service))


async def test_two_tenants_do_not_see_each_other(tmp_path):
    async with HttpWorld(tmp_path) as world, service_of(world) as alice, service_of(world, "bob") as bob:

        def saved() -> str:
            training = alice.create_lora_training_client(base_model=BASE, rank=8).result()
            return training.save_state("mine").result().path

        path = await asyncio.to_thread(saved)
        with pytest.raises(tinker.NotFoundError, match="no weights of yours"):
            await asyncio.to_thread(lambda: bob.create_training_client_from_state(path).result())

        def stranger() -> None:
            service = tinker.ServiceClient(base_url=world.url, api_key="tml-alice-0")
            service.create_lora_training_client(base_model=BASE).result()

        with pytest.raises(tinker.AuthenticationError, match="none of this server's"):
            await asyncio.to_thread(stranger)


async def test_over_tls_with_an_authority_of_ones_own_it_asks_for_no_more_than_that_authority(tmp_path, monkeypatch):
    authority, certificate, key = make_authority(tmp_path)
    async with HttpWorld(tmp_path / "served", tls=server_tls(str(certificate), str(key))) as world:
        assert world.url.startswith("https://")
        monkeypatch.setenv("SSL_CERT_FILE", str(authority))
        async with service_of(world) as service:
            training = await asyncio.to_thread(
                lambda: service.create_lora_training_client(base_model=BASE, rank=8, seed=3).result()
            )
            result = await asyncio.to_thread(lambda: training.forward_backward([datum(1, 2)], "cross_entropy").result())
            assert "loss:sum" in result.metrics


async def test_the_clients_own_call_deletes_what_it_has_saved(tmp_path):
    async with HttpWorld(tmp_path) as world, service_of(world) as service:

        def story() -> None:
            training = service.create_lora_training_client(base_model=BASE, rank=8, seed=3).result()
            path = training.save_state("kept").result().path
            rest = service.create_rest_client()
            rest.delete_checkpoint_from_tinker_path(path).result()
            with pytest.raises(tinker.TinkerError, match="no weights of yours"):
                rest.delete_checkpoint_from_tinker_path(path).result()

        await asyncio.to_thread(story)
