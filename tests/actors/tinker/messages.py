"""Messages of the client, made by hand so that they can be wrong, and what asks with them over HTTP."""

from __future__ import annotations

from typing import Any

import numpy as np
from tinker.proto import tinker_public_pb2 as proto

from tests.actors.tinker.tinker_world import BASE

ADAM = {"learning_rate": 1e-4}


def ints(*values: int) -> proto.Tensor:
    return proto.Tensor(dense=np.asarray(values, np.int64).tobytes(), dtype=proto.DTYPE_INT64, shape=[len(values)])


def floats(*values: float, shape: list[int] | None = None) -> proto.Tensor:
    data = np.asarray(values, np.float32).tobytes()
    return proto.Tensor(dense=data, dtype=proto.DTYPE_FLOAT32, shape=shape or [len(values)])


def asked(model: str = "", seq: int = 1, tokens: tuple[int, ...] = (1, 2), **inputs: proto.Tensor) -> Any:
    message = proto.ForwardBackwardRequest(model_id=model, seq_id=seq, loss_fn="cross_entropy")
    datum = message.data.add()
    datum.model_input.add().encoded_text.tokens = np.asarray(tokens, np.int32).tobytes()
    for name, tensor in ({"target_tokens": ints(*tokens)} | inputs).items():
        datum.loss_fn_inputs[name].CopyFrom(tensor)
    return message


def with_loss(loss: str, config: dict[str, float] | None = None, **inputs: proto.Tensor) -> Any:
    message = asked(**inputs)
    message.loss_fn = loss
    for name, value in (config or {}).items():
        message.loss_fn_config_v2[name].number = value
    return message


def sparse(shape: list[int], starts: list[int], columns: list[int], values: list[int]) -> proto.Tensor:
    tensor = proto.Tensor(dtype=proto.DTYPE_INT64, shape=shape)
    tensor.sparse_csr.values = np.asarray(values, np.int64).tobytes()
    tensor.sparse_csr.crow_indices = np.asarray(starts, np.int64).tobytes()
    tensor.sparse_csr.col_indices = np.asarray(columns, np.int64).tobytes()
    return tensor


async def created(http: Any) -> tuple[str, str]:
    async with http.post("create_session", json={"tags": [], "user_metadata": None, "sdk_version": "0"}) as answer:
        session = (await answer.json())["session_id"]
    body = {"session_id": session, "model_seq_id": 0, "base_model": BASE, "lora_config": {"rank": 8, "seed": 1}}
    async with http.post("create_model", json=body) as answer:
        assert answer.status == 200, await answer.text()
        model = await answer.json()
    await retrieved(http, model["request_id"])
    return session, model["model_id"]


async def retrieved(http: Any, request: str) -> Any:
    while True:
        async with http.post("retrieve_future", json={"request_id": request}) as answer:
            if answer.status == 408:
                continue
            assert answer.status == 200, await answer.text()
            return await answer.json() if answer.content_type == "application/json" else await answer.read()


async def sent(http: Any, message: Any) -> Any:
    async with http.post("forward_backward", data=message.SerializeToString()) as answer:
        assert answer.status == 200, await answer.text()
        return await retrieved(http, (await answer.json())["request_id"])
