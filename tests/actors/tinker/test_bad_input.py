"""Wrong requests over HTTP: each is a 4xx with a sentence, or its own failed future, and the model goes on."""

# ruff: noqa: E501  a case a line
from __future__ import annotations

import asyncio
import io
import json
import re
import struct
from typing import Any

import pytest

pytest.importorskip("tinker")

from tinker.proto import tinker_public_pb2 as proto

from tests.actors.tinker.http_world import LIMITS, HttpWorld
from tests.actors.tinker.messages import ADAM, asked, created, floats, ints, retrieved, sent, sparse, with_loss
from tests.actors.tinker.tinker_world import BASE, CONTEXT, VOCABULARY


def with_text() -> Any:
    message = with_loss("ppo", logprobs=floats(-1, -1), advantages=floats(1, 1))
    message.loss_fn_config_v2["loss_id"].text = "mine"
    return message


def with_image() -> Any:
    message = asked()
    message.data[0].model_input.add().image.format = "png"
    return message


def empty() -> Any:
    message = asked()
    del message.data[:]
    return message


RATIOS = {"logprobs": floats(-1, -1), "advantages": floats(1, 1)}
REFUSED = {
    "a token outside the vocabulary": (asked(tokens=(1, VOCABULARY)), "token 100 is not of the vocabulary"),
    "a negative token": (asked(tokens=(1, -1)), "token -1 is not of the vocabulary"),
    "a target outside the vocabulary": (asked(target_tokens=ints(1, 1 << 40)), "target_tokens: token 1099511627776"),
    "a datum above the context": (asked(tokens=(1,) * (CONTEXT + 1)), "65 tokens: expected 1 to 64"),
    "a datum without tokens": (asked(tokens=()), "0 tokens: expected 1 to 64"),
    "no datum": (empty(), "data: it is empty"),
    "fewer targets than tokens": (asked(target_tokens=ints(1)), r"shape \[1\]: expected \[n\] or \[n, K\] with n = 2"),
    "targets that are no integers": (asked(target_tokens=floats(1, 2)), "expected integers"),
    "weights that are no numbers": (asked(weights=floats(1, float("nan"))), "weights: it has values that are not finite"),
    "weights without end": (asked(weights=floats(1, float("inf"))), "weights: it has values that are not finite"),
    "weights of another shape": (asked(weights=floats(1, 1, 1)), r"weights: shape \[3\]: expected \[2\]"),
    "a shape that its numbers do not fill": (asked(weights=floats(1, 1, shape=[2, 3])), "do not fill the shape"),
    "a shape of three sizes": (asked(weights=floats(1, 1, shape=[2, 1, 1])), "expected one or two sizes"),
    "a negative size": (asked(weights=floats(1, 1, shape=[-2])), "expected one or two sizes"),
    "a matrix that is larger than memory": (asked(target_tokens=sparse([2, 1 << 40], [0, 0, 0], [], [])), "too many numbers"),
    "rows that are no matrix": (asked(target_tokens=sparse([2, 2], [0, 2, 1], [0, 1], [1, 1])), "no sparse matrix"),
    "a column outside the matrix": (asked(target_tokens=sparse([2, 2], [0, 1, 2], [0, 9], [1, 1])), "no sparse matrix"),
    "half a number": (asked(weights=proto.Tensor(dense=b"abc", dtype=proto.DTYPE_FLOAT32, shape=[2])), "no whole number"),
    "an unknown dtype": (asked(weights=proto.Tensor(dense=b"", dtype=0, shape=[0])), "dtype 0 is not served"),
    "an unknown loss": (with_loss("hinge"), "'hinge' is not served: choose one of cross_entropy"),
    "stable_reinforce": (with_loss("stable_reinforce"), "choose loss_fn=importance_sampling, ppo or cispo"),
    "a loss that the server should run": (with_loss("custom"), "call forward_backward_custom with a Python function"),
    "an input that the loss does not take": (asked(rewards=floats(1, 1)), r"rewards: cross_entropy takes no such input"),
    "an input that is missing": (with_loss("ppo", logprobs=floats(-1, -1)), "advantages: ppo needs it"),
    "two targets at a position of ppo": (
        with_loss("ppo", target_tokens=sparse([2, 2], [0, 1, 2], [0, 1], [1, 1]), **RATIOS), r"expected \[n\] with n = 2"
    ),
    "an unknown parameter": (with_loss("ppo", {"beta": 1.0}, **RATIOS), "loss_fn_config.beta: ppo takes no such"),
    "a parameter that is no number": (with_loss("ppo", {"clip_low_threshold": float("nan")}, **RATIOS), "expected a finite"),
    "a parameter in words": (with_text(), "loss_fn_config.loss_id: 'mine': expected a number"),
    "an image": (with_image(), "image chunks are not served"),
}  # fmt: skip


async def test_what_is_wrong_in_a_call_is_its_failed_future_and_the_next_call_goes_on(tmp_path):
    async with HttpWorld(tmp_path) as world, world.client() as http:
        _, model = await created(http)
        for seq, (what, (message, told)) in enumerate(REFUSED.items(), 1):
            message.model_id, message.seq_id = model, seq
            answer = await sent(http, message)
            assert isinstance(answer, dict), what
            assert answer["category"] == "user", what
            assert re.search(told, answer["error"]), (what, answer["error"])
        assert isinstance(await sent(http, asked(model, len(REFUSED) + 1)), bytes)
        assert world.faults.calls == 1


STEPS = {
    "a learning rate of 1e9": ({"learning_rate": 1e9}, "learning_rate: 1e+09: expected 0 to 1000"),
    "a negative learning rate": ({"learning_rate": -1}, "learning_rate: -1"),
    "a beta of 1": ({"beta1": 1.0}, "beta1: 1: expected 0 to below 1"),
    "an eps in words": ({"eps": "small"}, "eps"),
    "an unknown field": ({"momentum": 1}, "momentum"),
}


async def test_what_is_wrong_in_a_step_is_its_failed_future(tmp_path):
    async with HttpWorld(tmp_path) as world, world.client() as http:
        _, model = await created(http)
        for seq, (what, (adam, told)) in enumerate(STEPS.items(), 1):
            body = {"adam_params": adam, "model_id": model, "seq_id": seq, "type": "optim_step"}
            async with http.post("optim_step", json=body) as answer:
                failed = await retrieved(http, (await answer.json())["request_id"])
            assert told in failed["error"], what
        for seq, (route, body) in enumerate(
            [("save_weights", {"path": "../up"}), ("save_weights", {"path": "a", "ttl_seconds": -1}),
             ("save_weights_for_sampler", {"path": "a/b"}), ("save_weights_external", {"path": "a"}),
             ("load_weights", {"path": "tinker://s-1:train:7/weights/a", "optimizer": True})],
            len(STEPS) + 1,
        ):  # fmt: skip
            async with http.post(route, json=body | {"model_id": model, "seq_id": seq}) as answer:
                assert (await retrieved(http, (await answer.json())["request_id"]))["category"] == "user", route
        async with http.post("optim_step", json={"adam_params": ADAM, "model_id": model, "seq_id": seq + 1}) as answer:
            assert (await retrieved(http, (await answer.json())["request_id"]))["metrics"]["steps"] == 1.0


def _datum_bomb() -> bytes:
    return asked("m").SerializeToString() + b"\x1a\x00" * 1_000_000


WRONG: dict[str, tuple[str, Any, int]] = {
    "a body that is no message": ("forward_backward", b"\xff" * 99, 400),
    "a body that is empty": ("forward_backward", b"", 400),
    "a million datums": ("forward_backward", _datum_bomb, 413),
    "a body that is too large": ("forward_backward", b"\0" * (2 << 20), 413),
    "a model that is nobody's": ("forward_backward", asked("s-9:train:0").SerializeToString(), 404),
    "a number below 1": ("forward_backward", lambda: asked("MODEL", 0).SerializeToString(), 400),
    "no JSON": ("optim_step", b"{", 400),
    "JSON that is no object": ("optim_step", b"[1]", 400),
    "JSON without end": ("optim_step", b"[" * 100_000, 400),
    "JSON without end in another route": ("create_session", b"[" * 100_000, 400),
    "bytes that are no text": ("create_session", b"\xff\xfe", 400),
    "no model": ("optim_step", {"adam_params": ADAM, "seq_id": 1}, 404),
    "no number": ("optim_step", {"adam_params": ADAM, "model_id": "MODEL"}, 400),
    "a number in words": ("optim_step", {"adam_params": ADAM, "model_id": "MODEL", "seq_id": "1"}, 400),
    "a number of 300 digits": ("optim_step", {"adam_params": ADAM, "model_id": "MODEL", "seq_id": 10**300}, 400),
    "a session that is nobody's": ("session_heartbeat", {"session_id": "s-9"}, 404),
    "a request that was never made": ("retrieve_future", {"request_id": "MODEL/77"}, 404),
    "a request id of nobody": ("retrieve_future", {"request_id": "x/1"}, 404),
    "a base model that is not served": ("create_model", {"session_id": "SESSION", "model_seq_id": 1, "base_model": "a/b", "lora_config": {"rank": 8}}, 400),
    "a flag that cannot be honoured": ("create_model", {"session_id": "SESSION", "model_seq_id": 1, "base_model": BASE, "lora_config": {"rank": 8, "train_mlp": False}}, 400),
    "a negative rank": ("create_model", {"session_id": "SESSION", "model_seq_id": 1, "base_model": BASE, "lora_config": {"rank": -8}}, 400),
    "another optimizer": ("create_model", {"session_id": "SESSION", "model_seq_id": 1, "base_model": BASE, "lora_config": {"rank": 8}, "optimizer_config": {"type": "dimuon"}}, 400),
    "a path that is none": ("create_sampling_session", {"session_id": "SESSION", "sampling_session_seq_id": 5, "model_path": "tinker://../../etc"}, 404),
    "weights that are not for samplers": ("create_sampling_session", {"session_id": "SESSION", "sampling_session_seq_id": 5, "model_path": "tinker://MODEL/weights/a"}, 404),
    "neither path nor base": ("create_sampling_session", {"session_id": "SESSION", "sampling_session_seq_id": 5}, 400),
    "a sample of nobody's session": ("asample", {"sampling_session_id": "x", "seq_id": 0, "prompt": {"chunks": []}, "sampling_params": {}}, 404),
    "a route that there is not": ("create_custom_loss", {}, 404),
}  # fmt: skip


async def test_a_wrong_request_is_told_in_a_sentence_with_a_status_that_no_client_repeats(tmp_path):
    limits = LIMITS.model_copy(update={"tinker_request_bytes": (2 << 20) - 1})
    async with HttpWorld(tmp_path, limits) as world, world.client() as http:
        session, model = await created(http)
        for what, (route, body, status) in WRONG.items():
            data = body() if callable(body) else body
            if isinstance(data, dict):
                text = json.dumps(data).replace("MODEL", model).replace("SESSION", session)
                data = text.encode()
            if what == "a number below 1":
                data = asked(model, 0).SerializeToString()
            if what == "a million datums":
                data = data[:2_000_000]
            async with http.post(route, data=io.BytesIO(data)) as answer:
                told = await answer.json()
                assert answer.status == status, (what, answer.status, told)
                assert len(told["error"]) > 15, what
        assert isinstance(await sent(http, asked(model)), bytes)


SAMPLES: dict[str, tuple[dict[str, Any], str]] = {
    "no token": ({"prompt": []}, "0 tokens"),
    "a prompt above the context": ({"prompt": [1] * CONTEXT}, "64 tokens: expected 1 to 63"),
    "a token outside the vocabulary": ({"prompt": [1, 500]}, "token 500"),
    "a token without end": ({"prompt": [10**30]}, "64 bits"),
    "a million samples": ({"num_samples": 10**6}, "num_samples"),
    "no tokens to draw": ({"sampling_params": {"max_tokens": 0}}, "max_tokens"),
    "a negative temperature": ({"sampling_params": {"temperature": -1}}, "temperature"),
    "an empty stop": ({"sampling_params": {"stop": [""]}}, "stop"),
    "many stops": ({"sampling_params": {"stop": ["a"] * 100}}, "stop"),
    "a top_p of 2": ({"sampling_params": {"top_p": 2}}, "top_p"),
    "stability": ({"record_stability_info": True}, "record_stability_info: it is not served"),
    "drawn alternatives": ({"prompt_alt_tokens_k": 2}, "prompt_alt_tokens_k: it is not served"),
    "the last tokens of no log-probabilities": ({"prompt_logprobs_last_n": 1}, "with prompt_logprobs"),
}


async def test_a_wrong_sample_is_told_in_a_sentence(tmp_path):
    async with HttpWorld(tmp_path) as world, world.client() as http:
        session, _ = await created(http)
        body = {"session_id": session, "sampling_session_seq_id": 0, "base_model": BASE}
        async with http.post("create_sampling_session", json=body) as answer:
            sampler = (await answer.json())["sampling_session_id"]
        right = {"sampling_session_id": sampler, "num_samples": 1, "sampling_params": {"max_tokens": 2}}
        for seq, (what, (wrong, told)) in enumerate(SAMPLES.items()):
            tokens = {"prompt": {"chunks": [{"type": "encoded_text", "tokens": wrong.get("prompt", [1, 2])}]}}
            async with http.post("asample", json=right | wrong | tokens | {"seq_id": seq}) as answer:
                said = await answer.json()
                assert answer.status == 400, (what, said)
                assert told in said["error"], (what, said)
        assert world.sampler_faults.calls == 0


@pytest.mark.parametrize("key", ["", "tml-alice-0", "Bearer x", "tml-"])
async def test_without_a_key_nothing_is_answered_but_that_the_server_lives(tmp_path, key):
    async with HttpWorld(tmp_path) as world, world.client() as http:
        for route in ("client/config", "create_session", "retrieve_future", "no_such_route"):
            async with http.post(route, json={}, headers={"X-API-Key": key}) as answer:
                assert answer.status == 401
        async with http.get("healthz", headers={"X-API-Key": key}) as answer:
            assert await answer.json() == {"status": "ok"}


async def test_ten_thousand_futures_that_nobody_fetches_are_refused_beyond_the_bound(tmp_path):
    limits = LIMITS.model_copy(update={"tinker_waiting_operations": 20})
    async with HttpWorld(tmp_path, limits) as world, world.client() as http:
        _, model = await created(http)
        statuses: list[int] = []
        for seq in range(2, 40):
            async with http.post("optim_step", json={"adam_params": ADAM, "model_id": model, "seq_id": seq}) as answer:
                statuses.append(answer.status)
        assert statuses == [200] * 20 + [429] * 18
        async with http.post("optim_step", json={"adam_params": ADAM, "model_id": model, "seq_id": 1}) as answer:
            assert answer.status == 200
            await retrieved(http, (await answer.json())["request_id"])


async def test_a_large_answer_is_announced_by_its_size_first(tmp_path):
    async with (
        HttpWorld(tmp_path, LIMITS.model_copy(update={"tinker_inline_bytes": 10})) as world,
        world.client() as http,
    ):
        _, model = await created(http)
        async with http.post("forward_backward", data=asked(model).SerializeToString()) as answer:
            request = (await answer.json())["request_id"]
        whole = await retrieved(http, request)
        async with http.post("retrieve_future", json={"request_id": request, "allow_metadata_only": True}) as answer:
            assert await answer.json() == {"status": "complete_metadata", "response_payload_size": len(whole)}


async def test_two_targets_at_a_position_come_back_in_their_shape(tmp_path):
    async with HttpWorld(tmp_path) as world, world.client() as http:
        _, model = await created(http)
        message = asked(model, 1, (1, 2))
        wide = asked("", 1, (3, 4, 5), target_tokens=sparse([3, 2], [0, 2, 3, 3], [0, 1, 1], [7, 8, 9])).data[0]
        message.data.append(wide)
        message.data.append(message.data[0])
        output = proto.ForwardBackwardOutput.FromString(await sent(http, message))
        records = [(one.num_datums, list(one.fields["logprobs"].trailing_shape)) for one in output.loss_fn_outputs]
        assert records == [(1, []), (1, [2]), (1, [])]
        fields = output.loss_fn_outputs[1].fields["logprobs"]
        assert struct.unpack("<2q", fields.offsets) == (0, 3 * 2 * 4)
        assert output.metrics["loss:sum"] > 0


async def test_a_poll_that_nobody_waits_for_any_more_ends_with_its_connection_and_harms_nobody(tmp_path):
    async with HttpWorld(tmp_path) as world, world.client() as http:
        _, model = await created(http)
        async with http.post("optim_step", json={"adam_params": ADAM, "model_id": model, "seq_id": 2}) as answer:
            request = (await answer.json())["request_id"]
        for _ in range(5):
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.05), http.post("retrieve_future", json={"request_id": request}):
                    pass
        async with http.post("optim_step", json={"adam_params": ADAM, "model_id": model, "seq_id": 1}):
            pass
        assert (await retrieved(http, request))["metrics"]["steps"] == 2.0
