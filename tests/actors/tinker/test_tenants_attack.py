"""One tenant attacks another, and the server: each request is refused in a sentence, and no number of the other changes.

Beside every attack a victim trains, saves and samples; what it is told must be what it is told alone.
"""

# ruff: noqa: E501  a case a line
from __future__ import annotations

import asyncio
import gzip
import io
import json
from typing import Any

import numpy as np
import pytest
import yarl

pytest.importorskip("tinker")

from tinker.proto import tinker_public_pb2 as proto

from tests.actors.tinker.http_world import LIMITS, HttpWorld
from tests.actors.tinker.messages import ADAM, asked, created, retrieved, sent
from tests.actors.tinker.tinker_world import BASE, NAN_TOKEN, REFUSED_TOKEN
from tests.actors.tinker.victim import ALLOWED, LONGEST, beside_a_victim, refusal

# ------------------------------------------------------------ what is another's

THEIRS: dict[str, tuple[str, dict[str, Any] | None]] = {
    "a heartbeat": ("session_heartbeat", {"session_id": "SESSION"}),
    "the end of a session": ("sessions/SESSION/finish", {}),
    "a model in a session": ("create_model", {"session_id": "SESSION", "model_seq_id": 9, "base_model": BASE, "lora_config": {"rank": 8}}),
    "the same model again": ("create_model", {"session_id": "SESSION", "model_seq_id": 0, "base_model": BASE, "lora_config": {"rank": 8}}),
    "a sampling session in a session": ("create_sampling_session", {"session_id": "SESSION", "sampling_session_seq_id": 9, "base_model": BASE}),
    "what a model is": ("get_info", {"model_id": "MODEL"}),
    "a step": ("optim_step", {"model_id": "MODEL", "seq_id": 5, "adam_params": ADAM}),
    "a step far ahead": ("optim_step", {"model_id": "MODEL", "seq_id": 500, "adam_params": ADAM}),
    "weights saved over": ("save_weights", {"model_id": "MODEL", "seq_id": 5, "path": "mine", "overwrite": True}),
    "a snapshot": ("save_weights_for_sampler", {"model_id": "MODEL", "seq_id": 5, "path": "mine"}),
    "weights loaded into a model": ("load_weights", {"model_id": "MODEL", "seq_id": 5, "path": "tinker://MODEL/weights/mine", "optimizer": True}),
    "an answer": ("retrieve_future", {"request_id": "MODEL/1"}),
    "an answer that will come": ("retrieve_future", {"request_id": "MODEL/5"}),
    "a sample's answer": ("retrieve_future", {"request_id": "SAMPLER/1"}),
    "a sample": ("asample", {"sampling_session_id": "SAMPLER", "seq_id": 77, "num_samples": 1, "sampling_params": {}, "prompt": {"chunks": []}}),
    "what a sampler is": ("samplers/SAMPLER", None),
    "what a run is": ("training_runs/MODEL", None),
    "what saved weights are": ("weights_info", {"tinker_path": "tinker://MODEL/weights/mine"}),
    "a model from weights": ("load_weights", {"session_id": "OWN", "model_seq_id": 7, "path": "tinker://MODEL/weights/mine", "optimizer": True}),
    "a sampler of weights": ("create_sampling_session", {"session_id": "OWN", "sampling_session_seq_id": 8, "model_path": "tinker://MODEL/sampler_weights/mine"}),
}  # fmt: skip


async def test_what_is_another_tenants_is_answered_as_what_does_not_exist(tmp_path):
    async with beside_a_victim(tmp_path) as (_, http, victim):
        own, _ = await created(http)

        async def told(route: str, body: dict[str, Any] | None, ids: dict[str, str]) -> tuple[int, str]:
            text = json.dumps(body)
            for name, one in (ids | {"OWN": own}).items():
                route, text = route.replace(name, one), text.replace(name, one)
            sent_ = http.get(route) if body is None else http.post(route, data=text.encode())
            async with sent_ as answer:
                status, said = await refusal(answer)
            for name, one in ids.items():
                said = said.replace(one, name)
            return status, said

        right = {"SAMPLER": victim.sampler, "MODEL": victim.model, "SESSION": victim.session}
        nobodys = {"SAMPLER": "s-77:sample:0", "MODEL": "s-77:train:0", "SESSION": "s-77"}
        for what, (route, body) in THEIRS.items():
            theirs = await told(route, body, right)
            assert theirs == await told(route, body, nobodys), what
            assert theirs[0] in (400, 404), what
        async with http.post("forward_backward", data=asked(victim.model, 5).SerializeToString()) as answer:
            assert (await refusal(answer))[0] == 404


async def test_a_model_of_ones_own_is_not_loaded_with_anothers_weights(tmp_path):
    async with beside_a_victim(tmp_path) as (_, http, victim):
        _, model = await created(http)
        body = {"model_id": model, "seq_id": 1, "path": f"tinker://{victim.model}/weights/mine", "optimizer": True}
        async with http.post("load_weights", json=body) as answer:
            failed = await retrieved(http, (await answer.json())["request_id"])
        assert (failed["category"], "no weights of yours" in failed["error"]) == ("user", True)
        assert isinstance(await sent(http, asked(model, 2)), bytes)


async def test_no_altered_key_is_taken(tmp_path):
    async with beside_a_victim(tmp_path) as (world, _, _):
        key, mallorys = world.key(), world.key("mallory")
        (tmp_path / "other").mkdir()
        async with HttpWorld(tmp_path / "other") as other:
            foreign = other.key()
        signature = key.rpartition("-")[2]
        wrong: list[bytes] = [
            one.encode() for one in (
                foreign, key[:-1], key[:-8], key + "0", key.upper(), key.replace("alice", "alicе"), key.replace("alice", "Alice"),
                key.replace("alice", "bob"), f"tml-alice-{mallorys.rpartition('-')[2]}", f"tml--{signature}", f"tml-{signature}",
                "tml-alice-", "tml-alice", "alice", f"Bearer {key}", f"{key},{mallorys}", f"tml-../alice-{signature}", "ключ", "tml-" + "a" * 4000,
            )
        ]  # fmt: skip
        wrong += [key.encode()[:-1] + b"\xff", b"\xfe\xff", key.encode("utf-16-le").replace(b"\0", b"\x7f")]
        for one in wrong:
            status, body = await raw(
                world,
                b"POST /api/v1/create_session HTTP/1.1\r\nHost: x\r\nX-API-Key: "
                + one
                + b"\r\nContent-Length: 2\r\n\r\n{}",
            )
            assert status in (400, 401), one
            assert b"Traceback" not in body


async def raw(world: HttpWorld, request: bytes) -> tuple[int, bytes]:
    """Status and body of what is answered to bytes."""
    async with asyncio.timeout(20):
        reader, writer = await asyncio.open_connection("127.0.0.1", yarl.URL(world.url).port)
        try:
            writer.write(request)
            head = await reader.readuntil(b"\r\n\r\n")
            return int(head.split()[1]), await reader.read(4096)
        finally:
            writer.close()
            await writer.wait_closed()


ODD = [
    "..%2f..%2foperations.db",
    "%2e%2e",
    "a%2fb",
    "%00",
    "MODEL%00",
    "%ff",
    "%ed%a0%80",
    "a%0d%0ab",
    "..;",
    "%25%32%66",
    "x" * 5000,
    "💥",
]


async def test_odd_names_in_addresses_name_nothing(tmp_path):
    async with beside_a_victim(tmp_path) as (world, http, victim):
        for name in ODD:
            odd = name.replace("MODEL", victim.model)
            for method, route in (("GET", "samplers/{}"), ("GET", "training_runs/{}"), ("POST", "sessions/{}/finish")):
                url = yarl.URL(f"{world.url}/api/v1/{route.format(odd)}", encoded=name.isascii())
                async with http.request(method, url, json={} if method == "POST" else None) as answer:
                    await refusal(answer)
        for path in (
            "/api/v1/../../etc/passwd",
            "/../operations.db",
            "/api/v1/%2e%2e/tinker.key",
            "//api/v1/healthz/..",
            "/tinker.key",
        ):
            async with http.get(yarl.URL(world.url + path, encoded=True)) as answer:
                assert answer.status == 404


JSON_ODD = ['"\\u0000"', '"MODEL\\u0000"', '"\\ud800"', '"../../operations.db"', '"tinker://../weights/mine"', '"tinker://MODEL/weights/../../x"',
            '"tinker://MODEL/weights/mine\\u0000"', '"tinker://MODEL/../weights"', '"tinker://LONG/weights/a"', '"LONG"', "7", "[]", "{}", "true", "null", "1e999", '"\\u202e"']  # fmt: skip


async def test_odd_names_in_bodies_name_nothing_and_are_told_in_short(tmp_path):
    async with beside_a_victim(tmp_path) as (_, http, victim):
        own, _ = await created(http)
        for route, body in (
            ("session_heartbeat", '{"session_id": ODD}'), ("get_info", '{"model_id": ODD}'), ("retrieve_future", '{"request_id": ODD}'),
            ("optim_step", '{"model_id": ODD, "seq_id": 1, "adam_params": {}}'), ("weights_info", '{"tinker_path": ODD}'),
            ("load_weights", '{"session_id": "OWN", "model_seq_id": 1, "path": ODD, "optimizer": true}'),
            ("create_sampling_session", '{"session_id": "OWN", "sampling_session_seq_id": 1, "model_path": ODD}'),
            ("create_sampling_session", '{"session_id": "OWN", "sampling_session_seq_id": 1, "base_model": ODD}'),
            ("asample", '{"sampling_session_id": ODD, "seq_id": 1, "prompt": {"chunks": []}, "sampling_params": {}}'),
            ("create_model", '{"session_id": ODD, "model_seq_id": 1, "base_model": "x", "lora_config": {"rank": 8}}'),
            ("create_model", '{"session_id": "OWN", "model_seq_id": 1, "base_model": ODD, "lora_config": {"rank": 8}}'),
        ):  # fmt: skip
            for odd in JSON_ODD:
                text = (
                    body.replace("ODD", odd)
                    .replace("MODEL", victim.model)
                    .replace("OWN", own)
                    .replace("LONG", "x" * 50_000)
                )
                async with http.post(route, data=text.encode()) as answer:
                    await refusal(answer)
        async with http.post("retrieve_future", json={"request_id": "x" * 50_000 + "/1"}) as answer:
            await refusal(answer)


# ------------------------------------------------------------ what is too much


def _chunks() -> Any:
    message = asked()
    message.data[0].MergeFromString(b"\x0a\x00" * 300_000)
    return message


def _long_shape() -> Any:
    message = asked()
    message.data[0].loss_fn_inputs["weights"].CopyFrom(
        proto.Tensor(dense=b"", dtype=proto.DTYPE_FLOAT32, shape=np.ones(300_000, np.int64))
    )
    return message


def _long_names() -> Any:
    message = asked()
    message.loss_fn_config_v2["x" * 50_000].text = "y" * 50_000
    message.data[0].loss_fn_inputs["z" * 50_000].CopyFrom(proto.Tensor(dtype=proto.DTYPE_FLOAT32))
    return message


def _spans() -> Any:
    message = asked()
    message.data[0].MergeFromString(b"\x1a\x00" * 300_000)
    return message


LARGE = {
    "hundreds of thousands of chunks": _chunks,
    "as many sizes": _long_shape,
    "names without end": _long_names,
    "as many spans": _spans,
}


async def test_messages_that_grow_when_they_are_read_are_refused(tmp_path):
    async with beside_a_victim(tmp_path) as (world, http, _):
        _, model = await created(http)
        before, seq = world.faults.calls, 0
        for what, make in LARGE.items():
            message = make()
            message.model_id, message.seq_id = model, seq + 1
            async with http.post("forward_backward", data=io.BytesIO(message.SerializeToString())) as answer:
                if answer.status != 200:
                    await refusal(answer)
                    continue
                failed, seq = await retrieved(http, (await answer.json())["request_id"]), seq + 1
                assert failed["category"] == "user", what
                assert len(failed["error"]) < LONGEST, what
        assert world.faults.calls == before
        assert isinstance(await sent(http, asked(model, seq + 1)), bytes)


async def test_json_that_is_wrong_over_and_over_is_told_once(tmp_path):
    async with beside_a_victim(tmp_path) as (_, http, _):
        own, _ = await created(http)
        wrong = "[" + "{}," * 30_000 + "{}]"
        keys = "{" + ",".join(f'"k{number}": 1' for number in range(5_000)) + "}"
        for route, body in (
            ("create_session", f'{{"tags": {wrong}, "sdk_version": "0"}}'),
            ("create_session", keys), ("optim_step", keys), ("session_heartbeat", wrong),
            ("asample", f'{{"sampling_session_id": "x", "seq_id": 0, "sampling_params": {{}}, "prompt": {{"chunks": {wrong}}}}}'),
            ("asample", f'{{"sampling_session_id": "x", "seq_id": 0, "sampling_params": {{"stop": {wrong}{wrong}}}, "prompt": {{"chunks": []}}}}'.replace("][", ",")),
            ("create_model", f'{{"session_id": "{own}", "model_seq_id": 1, "base_model": "{BASE}", "lora_config": {{"rank": 8}}, "user_metadata": {{"a": "{"x" * 1_100_000}"}}}}'),
        ):  # fmt: skip
            async with http.post(route, data=io.BytesIO(body.encode())) as answer:
                await refusal(answer)


@pytest.mark.parametrize(
    ("encoding", "body"),
    [("gzip", gzip.compress(bytes(16 << 20), 1)), ("gzip", b"\x1f\x8b" + b"x" * 99), ("deflate", b"xyz"),
     ("zstd", b"\x28\xb5\x2f\xfdx"), ("br", b"xyz"), ("gzip, gzip", gzip.compress(gzip.compress(b"{}"))), ("a lot", b"{}")],
    ids=["a bomb", "no gzip", "no deflate", "no zstd", "no br", "gzip twice", "unknown"],
)  # fmt: skip
async def test_a_packed_body_is_unpacked_up_to_the_limit_or_refused(tmp_path, encoding, body):
    limits = LIMITS.model_copy(update={"tinker_request_bytes": 1 << 20})
    async with beside_a_victim(tmp_path, limits) as (_, http, _):
        for route in ("create_session", "forward_backward", "telemetry"):
            async with http.post(
                route, data=body, headers={"Content-Encoding": encoding, "Connection": "close"}
            ) as answer:
                assert answer.status in ALLOWED or (route, answer.status) == ("telemetry", 200)


# ------------------------------------------------------------ who takes all the room


async def test_a_tenant_that_leaves_ten_thousand_futures_fills_its_own_bound(tmp_path):
    limits = LIMITS.model_copy(update={"tinker_waiting_operations": 50, "tinker_tenant_requests": 40})
    async with beside_a_victim(tmp_path, limits) as (world, http, victim):
        _, model = await created(http)

        async def left(seq: int) -> int:
            body = {"adam_params": ADAM, "model_id": model, "seq_id": seq}
            async with http.post("optim_step", json=body) as answer:
                return answer.status

        statuses = [
            status
            for start in range(2, 200, 30)
            for status in await asyncio.gather(*map(left, range(start, start + 30)))
        ]
        assert (statuses.count(200), set(statuses)) == (50, {200, 429})
        polls = [
            asyncio.ensure_future(http.post("retrieve_future", json={"request_id": f"{model}/2"})) for _ in range(90)
        ]
        await asyncio.sleep(0.1)
        async with world.client() as victims, victims.post("get_info", json={"model_id": victim.model}) as answer:
            assert answer.status == 200
        statuses = [answer.status for answer in await asyncio.gather(*polls)]
        assert set(statuses) == {408, 429}


async def test_bodies_that_never_end_cost_their_sender_alone(tmp_path):
    limits = LIMITS.model_copy(update={"tinker_read_s": 0.3, "tinker_tenant_requests": 20})
    async with beside_a_victim(tmp_path, limits) as (world, _, _):
        head = f"POST /api/v1/create_session HTTP/1.1\r\nHost: x\r\nX-API-Key: {world.key('mallory')}\r\nContent-Length: 1000000\r\n\r\n{{"
        answers = await asyncio.gather(*(raw(world, head.encode()) for _ in range(30)))
        assert {status for status, _ in answers} == {400, 429}
        assert any(b"did not come within 0.3 s" in body for _, body in answers)
        for said in (b"", b"POST /api/v1/create_session HTTP/1.1\r\nX-API-Key: "):
            with pytest.raises(asyncio.IncompleteReadError):
                await raw(world, said)  # it is closed, without a word


async def test_what_fails_in_one_tenants_model_stays_there(tmp_path):
    async with beside_a_victim(tmp_path) as (world, http, _):
        _, model = await created(http)
        outcomes = list[str]()
        world.faults.broken_at = {world.faults.calls + 3}
        for seq, token in enumerate((NAN_TOKEN, REFUSED_TOKEN, 5, 5), 1):
            answer = await sent(http, asked(model, seq, (token, 1)))
            outcomes.append(answer["category"] if isinstance(answer, dict) else "fine")
        assert outcomes == ["user", "user", "server", "fine"]
