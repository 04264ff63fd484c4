"""The engine of a worker that computes nothing: it speaks HTTP to a ``vllm serve`` process that the user started.

    add, abort ──▶ ``streams.py``: a stream for each sequence, whose tokens gather as they arrive
    step ─────────▶ wait for some ─▶ take what has arrived ─▶ is the label still ours? ─▶ rows
    load_weights ─▶ close all streams ─▶ ``transfer.py``, under a new label ─▶ streams anew for what has not ended

Invariants beyond the protocol's
- A label names one load of one life of one worker. Tokens become rows only if the server, asked after they had arrived,
  still has the label of our last load. So a server that was started again, or given other weights, is found before any
  of its tokens is used. The versions that end a stream must be that label, too.
- A stream never outlives a load: what had not ended goes on as a new request, from the tokens that became rows. Its
  cache salt says what of the prefix cache it may use: with ``keep`` its own of before, else that of the new label.
- A server that is gone ends the worker without blame. ``start`` raises ServerGone if none answers in time, and closes
  what it has opened: the worker starts the engine again until one does.
- A step takes what has arrived: it may bring a sequence no token, or many.
- Equal requests give equal samples; one that was moved, or went through a load, goes on with other tokens than if it
  had not, since the server's noise is of a whole request.
- All of a sequence's tokens count as prefilled when it begins: the server does not say which it had.

``EngineSpec.options``: ``url``, ``answer_s`` and ``start_s`` (``limits.server_answer_s``, ``limits.server_start_s``),
``load_s`` (``limits.pull_timeout_s``), and ``step_ms``: a step gathers for so long unless a sequence ends, default 50.
"""

from __future__ import annotations

import asyncio
import json
import secrets
from collections.abc import Mapping, Sequence
from typing import Final, Literal

import numpy as np
import structlog

from actors.protocol.tokens import FinishReason
from actors.protocol.work import EngineStats
from actors.rollout.engine import SLOTS_MAX, EngineSpec, GenerationRequest, StepOutput, WeightTensors, slots_of
from actors.rollout.engines.requests import check_requests, to_compute
from actors.rollout.engines.server.abilities import examine
from actors.rollout.engines.server.client import ServerClient
from actors.rollout.engines.server.gauges import Preemptions
from actors.rollout.engines.server.streams import Stream, Streams, label_of, other_weights
from actors.rollout.engines.server.transfer import Transfer, off_loop
from actors.rollout.engines.step_columns import StepColumns
from actors.rollout.engines.step_stats import StepStats
from actors.rollout.engines.vllm.weights import Expected
from actors.rollout.errors import EngineError, EngineUnavailable, RequestRefused, ServerGone

log = structlog.get_logger("headrace.server_engine")

_LOOK_S: Final = 1.0


class ServerEngine:
    """Implements ``RolloutEngine`` over a server's HTTP interface."""

    kind = "server"

    def __init__(self) -> None:
        self._spec: EngineSpec | None = None
        self._client: ServerClient | None = None
        self._streams: Streams | None = None
        self._transfer: Transfer | None = None
        self._preemptions: Preemptions | None = None
        self._expected: Expected | None = None
        self._vocabulary = self._kv_tokens = self._slots = 0
        self._life = secrets.token_hex(8)
        self._loads = 0
        self._label = ""
        """Label of our last load; empty: the server may have any weights."""
        self._unready = ""
        """Why there may be no step; empty: there may."""
        self._version = 0
        self._columns = StepColumns()
        self._asleep = 0
        self._stats = StepStats()

    # ------------------------------------------------------------ life

    async def start(self, spec: EngineSpec) -> None:
        self._spec = spec
        self._step_s = float(spec.options.get("step_ms", 50)) / 1000
        answer_s = float(spec.options["answer_s"])
        self._client = client = ServerClient(str(spec.options["url"]), answer_s)
        await client.open()
        try:
            self._expected = await off_loop(Expected.of_checkpoint, spec.model_path, spec.dtype)
            config = json.loads((spec.model_path / "config.json").read_text(encoding="utf-8"))
            self._vocabulary = int((config.get("text_config") or config)["vocab_size"])
            await self._wait_for_server(client, float(spec.options["start_s"]))
            can = await examine(client, context_tokens=spec.max_context_tokens, config=config)
        except BaseException:
            await client.close()
            raise
        if can.missing:
            await client.close()
            raise EngineUnavailable(
                f"the server at {client.url} cannot serve a worker. It lacks {'; and '.join(can.missing)}"
            )
        if not can.maps:
            log.warning("weights are copied", server=client.url, why=can.in_words())
        context = spec.max_context_tokens
        self._slots = spec.max_running or slots_of(can.kv_tokens or SLOTS_MAX * context, context, sets_aside=True)
        self._kv_tokens = can.kv_tokens or self._slots * context
        self._streams = Streams(
            client, max_running=self._slots, context_tokens=spec.max_context_tokens, life=self._life,
            answer_s=answer_s, ask=self._confirm,
        )  # fmt: skip
        self._preemptions = Preemptions(client)
        self._transfer = Transfer(client, maps=can.maps, load_s=float(spec.options["load_s"]))
        self._stats.last_end_s = asyncio.get_running_loop().time()

    async def _wait_for_server(self, client: ServerClient, patience_s: float) -> None:
        """Wait until something answers.

        Raises:
            ServerGone: nothing has, for ``patience_s``.
        """
        clock = asyncio.get_running_loop().time
        until_s = clock() + patience_s
        while True:
            try:
                await client.text("/health")
                return
            except ServerGone as error:
                if clock() >= until_s:
                    raise ServerGone(
                        f"no server answers at {client.url} (rollout.servers) for {patience_s:g} s. Start it with "
                        "vllm serve, or leave the address out; docs/guides/own_servers.md"
                    ) from error
            await asyncio.sleep(_LOOK_S)

    @property
    def slots(self) -> int:
        return self._slots

    async def close(self) -> None:
        client, self._client = self._client, None
        if self._streams is not None:
            await self._streams.withdraw()
        if client is not None:
            await client.close()

    # ------------------------------------------------------------ requests

    def add(self, requests: Sequence[GenerationRequest]) -> None:
        known = {sequence.request.request for sequence in self._live}
        if in_use := [request.request for request in requests if request.request in known]:
            raise RequestRefused(f"request {in_use[0]}: a sequence of that number has not ended", tuple(in_use))
        check_requests(requests, vocab=self._vocabulary)
        for request in to_compute(requests, self._started.max_context_tokens, self._columns):
            self._live.add(request)

    def abort(self, requests: Sequence[int]) -> None:
        for sequence in self._live.remove(set(map(int, requests))):
            self._columns.end(sequence.request.request, sequence.position, FinishReason.ABORTED)

    @property
    def has_work(self) -> bool:
        return bool(self._live.running or self._live.waiting or self._columns)

    # ------------------------------------------------------------ a step

    async def step(self) -> StepOutput:
        if self._unready or self._asleep or self._preemptions is None:
            raise EngineError(self._unready or "the engine is asleep, or not started; wake it first")
        clock = asyncio.get_running_loop().time
        began_s = clock()
        if not self._label:
            await self._load_checkpoint()
        preemptions = await self._preemptions.new(began_s)
        begun = self._live.begin(self._label)
        if not self._columns:
            await self._live.gather(self._step_s)
        if taken := self._live.take():
            await self._confirm()
        for sequence, tokens, logprobs, end in taken:
            self._enter(sequence, tokens, logprobs, end)
        self._count(began_s, clock(), begun, sum(len(tokens) for _, tokens, _, _ in taken), preemptions)
        return self._columns.take(self._version, clock() - began_s)

    def hurry(self) -> None:
        if self._streams is not None:  # a version may have been pulled while the server is waited for
            self._streams.hurry()

    async def _confirm(self) -> None:
        """Ask whether the server still has our weights.

        Raises:
            ServerGone: it does not, or does not answer.
            EngineError: another worker has given it weights.
        """
        client = self._open_client
        if (served := await client.label()) != self._label:
            raise other_weights(client.url, served, self._label)

    def _enter(self, sequence: Stream, tokens: list[int], logprobs: list[float], end: FinishReason) -> None:
        """Make rows of tokens that were taken."""
        number, count = sequence.request.request, len(tokens)
        first = sequence.position - count
        if tokens:
            finished = np.zeros(count, np.uint8)
            finished[-1] = end
            self._columns.tokens(
                np.full(count, number, np.int64), np.arange(first, first + count), np.array(tokens, np.int64),
                np.array(logprobs, np.float32), finished,
            )  # fmt: skip
        elif end:
            self._columns.end(number, first, end)

    def _count(self, began_s: float, ended_s: float, begun: int, tokens: int, preemptions: int) -> None:
        held = sum(len(sequence.tokens) for sequence in self._live.running.values())
        self._stats.count(
            began_s,
            ended_s,
            running=len(self._live.running),
            queued=len(self._live.waiting),
            kv_used_fraction=min(1.0, held / self._kv_tokens),
            tokens=tokens,
            prefilled_tokens=begun,
            preemptions=preemptions,
        )

    def stats(self) -> EngineStats:
        return self._stats.now

    # ------------------------------------------------------------ weights

    @property
    def policy_version(self) -> int:
        return self._version

    async def load_weights(
        self,
        tensors: WeightTensors,
        dtypes: Mapping[str, str],
        policy_version: int,
        *,
        in_flight: Literal["keep", "recompute"],
    ) -> None:
        if self._asleep:
            raise EngineError("the engine is asleep; wake it before weights are loaded")
        assert self._expected is not None, "it has been started"
        self._expected.check(tensors, dtypes)
        await self._live.withdraw()
        if in_flight == "recompute":
            for sequence in self._live:
                sequence.salt = ""
        await self._load(tensors, dtypes, policy_version)

    async def _load(self, tensors: WeightTensors, dtypes: Mapping[str, str], policy_version: int) -> None:
        assert self._transfer is not None, "it has been started"
        self._unready = "the last load of weights failed; another must succeed before the next step"
        self._loads += 1
        label = label_of(self._life, self._loads, policy_version)
        await self._transfer.load(tensors, dtypes, label)
        self._label, self._version, self._unready = label, policy_version, ""

    async def _load_checkpoint(self) -> None:
        """Load the job's own model as version 0: nothing tells which weights the server began with."""
        tensors, dtypes = await off_loop(_checkpoint, self._started)
        await self._load(tensors, dtypes, 0)

    # ------------------------------------------------------------ memory

    async def sleep(self, level: int) -> None:
        """Close all streams. The server keeps its memory: it is the user's."""
        if level not in (1, 2):
            raise EngineError(f"sleep level {level} is unknown; use 1 (weights kept) or 2 (weights dropped)")
        await self._live.withdraw()
        if level == 2:
            self._unready = "sleep level 2 dropped the weights; they must be loaded before the next step"
        self._asleep = level

    async def wake(self) -> None:
        self._asleep = 0

    @property
    def _started(self) -> EngineSpec:
        if self._spec is None:
            raise EngineError("the engine is not started")
        return self._spec

    @property
    def _open_client(self) -> ServerClient:
        if self._client is None:
            raise EngineError("the engine is not started")
        return self._client

    @property
    def _live(self) -> Streams:
        if self._streams is None:
            raise EngineError("the engine is not started")
        return self._streams


def _checkpoint(spec: EngineSpec) -> tuple[dict[str, np.ndarray], dict[str, str]]:
    """The parameters of the model in ``spec.model_path``, and their dtypes. Blocks."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(spec.model_path, dtype=getattr(torch, spec.dtype))
    tensors = {name: parameter.detach() for name, parameter in model.named_parameters()}
    arrays = {
        name: (tensor.view(torch.uint16) if spec.dtype == "bfloat16" else tensor).numpy()
        for name, tensor in tensors.items()
    }
    return arrays, dict.fromkeys(arrays, spec.dtype)
