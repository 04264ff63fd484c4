"""Asks a server what it can, and names the flags with which it was not started.

    /resume ─▶ weight_info ─▶ /v1/models ─▶ a token of top-k 1 ─▶ headrace_hello ─▶ init_weight_transfer_engine
    a worker   dev mode?      long enough?  ids in and out, and    our extension?   our backend?
    may have                                its log-probability    the same model?      └─▶ mapped, else reloaded
    left it                                 is 0 if processed      the same machine?
    paused

Invariants
- Nothing that is asked changes weights, nor what another client of the server gets, but that a pause and an update of
  weights that are open are ended, where that is asked for.
- All that is missing is said at once.
"""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import msgspec

from actors.rollout.engines.server.client import API_KEY_VARIABLE, GENERATE, Choice, ServerClient
from actors.rollout.engines.server.gauges import kv_tokens
from actors.rollout.errors import EngineError, EngineUnavailable, ServerGone, ServerRefuses
from actors.weights.segments import segment_directory

PROTOCOL: Final = 1
EXTENSION: Final = "actors.rollout.engines.server.weight_backend.WorkerExtension"
TRANSFER_FLAGS: Final = f'--worker-extension-cls {EXTENSION} --weight-transfer-config \'{{"backend": "headrace"}}\''
_SHAPE_KEYS: Final = (
    *("model_type", "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"),
    *("num_key_value_heads", "head_dim", "n_embd", "n_layer", "n_head", "num_local_experts", "num_experts"),
)
"""Keys of a model's config.json that must be equal."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Abilities:
    """Says what a server can. ``missing``: sentences for people; if there are any, no worker can use the server."""

    version: str
    missing: tuple[str, ...]
    maps: bool
    """Whether the server maps weights from a file; else it reloads them from a directory."""
    kv_tokens: int
    """Tokens for which its KV cache has room; 0: it does not say."""

    def in_words(self) -> str:
        """The abilities as a short phrase."""
        how = "weights are mapped" if self.maps else f"weights are reloaded from files; {TRANSFER_FLAGS} would map them"
        return f"vLLM {self.version}, {how}"


class _Version(msgspec.Struct, frozen=True):
    version: str


class _Model(msgspec.Struct, frozen=True):
    id: str
    max_model_len: int | None = None


class _Models(msgspec.Struct, frozen=True):
    data: list[_Model]


class _Results(msgspec.Struct, frozen=True):
    results: list[str]


class _Hello(msgspec.Struct, frozen=True):
    protocol: int
    config: dict[str, Any]
    sees: bool


class _Whole(msgspec.Struct, frozen=True):
    choices: list[Choice]


async def examine(
    client: ServerClient, *, context_tokens: int = 0, config: Mapping[str, Any] | None = None, resume: bool = True
) -> Abilities:
    """What the server behind ``client`` can.

    Args:
        context_tokens: length of the longest sequence; 0: any.
        config: the model's config.json, to which the server's is compared; None: it is not.
        resume: whether an update of weights and a pause are ended, which an earlier life of the worker may have left.

    Raises:
        ServerGone: it does not answer.
        EngineUnavailable: it wants a key, or another than ours.
        EngineError: it is no vLLM.
    """
    version = (await client.get("/version", _Version)).version
    missing: list[str] = []
    developed = await _in_dev_mode(client, resume=resume)
    if not developed:
        missing.append("VLLM_SERVER_DEV_MODE=1 in its environment, without which no weights can be given to it")
    missing += await _too_short(client, context_tokens)
    missing += await _generates(client)
    maps = False
    if developed:
        maps, wrong = await _maps(client, config or {})
        missing += wrong
    return Abilities(version=version, missing=tuple(missing), maps=maps, kv_tokens=await kv_tokens(client))


async def described(url: str, answer_s: float) -> tuple[str, bool]:
    """What people should know of the server at ``url``, and whether a worker could use it as far as is known."""
    client = ServerClient(url, answer_s)
    await client.open()
    try:
        can = await examine(client, resume=False)  # another run's worker may be loading weights into it
    except ServerGone:
        return "does not answer now", True
    except EngineError as error:
        return str(error), False
    finally:
        await client.close()
    return (f"lacks {'; and '.join(can.missing)}", False) if can.missing else (can.in_words(), True)


async def _in_dev_mode(client: ServerClient, *, resume: bool) -> bool:
    try:
        await client.label()
        if resume:
            with contextlib.suppress(ServerRefuses):  # none is open; a token of half a model would end vLLM
                await client.post("/finish_weight_update")
            await client.post("/resume")
    except ServerRefuses as error:
        if error.status == 404:
            return False
        raise
    return True


async def _too_short(client: ServerClient, context_tokens: int) -> list[str]:
    try:
        models = await client.get("/v1/models", _Models)
    except ServerRefuses as error:
        if error.status in (401, 403):
            raise EngineUnavailable(
                f"the server at {client.url} wants the key of its --api-key: set {API_KEY_VARIABLE} to it in the "
                "environment of headrace"
            ) from error
        raise
    longest = next((model.max_model_len for model in models.data if model.max_model_len), 0)
    if longest < context_tokens:
        return [f"--max-model-len {context_tokens}, the longest sequence of the job; it has {longest}"]
    return []


async def _generates(client: ServerClient) -> list[str]:
    """Ask for one token with top-k 1: its log-probability after top-k is 0, and before it is not."""
    sampling = {"max_tokens": 1, "temperature": 1.0, "top_k": 1, "logprobs": 0, "ignore_eos": True, "seed": 0}
    body = {"token_ids": [1, 2, 3], "sampling_params": {**sampling, "detokenize": False}}
    try:
        answer = await client.post(GENERATE, body)
    except ServerRefuses as error:
        if error.status in (403, 404):
            return ["--enable-scale-out, for token ids in and out"]
        raise
    try:
        drawn = msgspec.json.decode(answer, type=_Whole).choices[0]
        logprob = drawn.logprobs.content[0].logprob if drawn.logprobs else -1.0
    except (msgspec.DecodeError, IndexError) as error:
        raise EngineError(f"the server at {client.url} answers {GENERATE} with {answer[:300]!r} ({error})") from error
    if abs(logprob) > 1e-6:
        return ["--logprobs-mode processed_logprobs: its log-probabilities are of the distribution before top-k"]
    return []


async def _maps(client: ServerClient, config: Mapping[str, Any]) -> tuple[bool, list[str]]:
    """Whether our extension and backend are there, and what is wrong with them, or with the model."""
    hello = await _hello(client)
    if hello is None:
        return False, []
    if hello.protocol != PROTOCOL:
        return False, [f"the weight_backend.py of this version of Headrace; it has one of protocol {hello.protocol}"]
    served = hello.config.get("text_config") or hello.config
    ours = config.get("text_config") or config
    other = [
        f"{key} {served[key]}, and model.path has {ours[key]}"
        for key in _SHAPE_KEYS
        if ours.get(key) is not None and served.get(key) is not None and ours[key] != served[key]
    ]
    if other:
        return False, [f"the job's model; its model has {'; '.join(other)}"]
    if not hello.sees:
        return False, [f"this machine's {segment_directory()} and our user, to map weights (docker: --ipc=host)"]
    try:
        await client.post("/init_weight_transfer_engine", {"init_info": {}})
    except ServerRefuses:
        return False, []
    return True, []


async def _hello(client: ServerClient) -> _Hello | None:
    """What our extension says of its process; None: it is not there."""
    with tempfile.NamedTemporaryFile(prefix="headrace-hello-", dir=segment_directory()) as probe:
        call = {"method": "headrace_hello", "kwargs": {"path": probe.name}}
        try:
            answer = await client.post("/collective_rpc", call)
        except ServerRefuses:
            return None
    try:
        said = [msgspec.json.decode(one, type=_Hello) for one in msgspec.json.decode(answer, type=_Results).results]
    except msgspec.DecodeError as error:
        raise EngineError(f"headrace_hello of the server at {client.url} answers {answer[:300]!r} ({error})") from error
    return next((one for one in said if not one.sees), said[0]) if said else None
