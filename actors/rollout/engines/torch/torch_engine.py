"""The embedded engine: plain torch, any HF causal LM, CPU and CUDA, continuous batching with a KV cache.

    add ─▶ waiting ─ admit ─▶ rows (prefilled: 0 … cached - 1 │ to prefill: the rest)
                                   │ decode: one token each    │ prefill: what the prefix cache lacks, once per distinct
                                   │                           │ prefix (shared_prefill.py)
                                   └──────────── logits ───────┘
                                     draw (noise of seed, prompt, sibling, position) ─▶ record ─▶ finished rows leave
                                     ─▶ siblings with the same tokens so far share a row of the cache (branches.py)

Everything that computes runs on the engine's own thread; between two calls nothing moves. It is an ``AdapterEngine``,
too: adapters of any shape run side by side (``side_adapters.py``), and prompts are scored (``prompt_scorer.py``).

Options (``EngineSpec.options``)
- ``decoder``: ``auto`` (default), ``fused`` or ``generic``; see ``decoder.py``.
- ``prefill_tokens``: padded tokens in one prefill batch, default 8192.
- ``step_ms``: a ``step`` continues, token by token, until this much time has passed, default 16. With a small model,
  whose tokens take a millisecond or two, that makes fewer, bigger messages; with a larger one a step is one token.
  ``hurry`` ends a step after the present token.
- ``tokens_per_step``: tokens that each sequence gains in one ``step``, whatever the time. A crash loses at most one
  step's tokens, and an abort waits for at most one step.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from time import perf_counter
from typing import Any, Literal, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

from actors.models.adapter import AdapterSpec
from actors.protocol.tokens import FinishReason
from actors.protocol.work import EngineStats
from actors.rollout.engine import EngineSpec, GenerationRequest, PromptScores, StepOutput, WeightTensors
from actors.rollout.engines.requests import check_requests, to_compute
from actors.rollout.engines.step_columns import StepColumns
from actors.rollout.engines.torch.branches import one_slot_each, rearranged
from actors.rollout.engines.torch.decoder import Decoder, make_decoder
from actors.rollout.engines.torch.kv_cache import slots_that_fit
from actors.rollout.engines.torch.model_loading import load_model, pick_device
from actors.rollout.engines.torch.rows import RunningRows
from actors.rollout.engines.torch.served_weights import ServedWeights
from actors.rollout.engines.torch.shared_prefill import SharedPrefill
from actors.rollout.engines.torch.side_adapters import SideAdapters
from actors.rollout.engines.torch.token_sampler import RowSampling, draw, likeliest
from actors.rollout.errors import EngineError, LogitsNotFinite, ModelUnreadable, RequestRefused
from actors.rollout.sampling import uniforms

T = TypeVar("T")
_KNOWN_OPTIONS = frozenset({"decoder", "prefill_tokens", "step_ms", "tokens_per_step"})


class TorchEngine:
    """Implements ``RolloutEngine``; see the module's docstring."""

    kind = "torch"
    tells_top_logprobs = True

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="torch-engine")
        self._spec: EngineSpec | None = None
        self._model: Any = None
        self._decoder: Decoder | None = None
        self._weights: ServedWeights | None = None
        self._prefill = SharedPrefill(0)
        self._slots = 1
        self._rows = RunningRows(1, 1)
        self._cached = 0
        """Rows 0 … ``_cached`` - 1 have keys and values; the others are prefilled in the next step."""
        self._branches = 0
        """Number of rows of the decoder's cache."""
        self._begun_tokens = 0
        """Number of tokens of all prefilled sequences, those from the prefix cache and of siblings included."""
        self._waiting: deque[GenerationRequest] = deque()
        self._aborted: set[int] = set()
        """Running requests to end at the start of the next step, on the engine's thread."""
        self._columns = StepColumns()
        self._version = 0
        self._sleeping = False
        self._weights_lost = False
        self._tokens_per_step = 0
        """Number of tokens that each sequence gains in a step; 0: as many as fit into ``_step_s``."""
        self._step_s = 0.0
        self._vocab = 0
        self._tops = 0  # the largest ``top_logprobs`` of the present sequences
        self._stats = EngineStats()

    async def start(self, spec: EngineSpec) -> None:
        if unknown := sorted(set(spec.options) - _KNOWN_OPTIONS):
            raise EngineError(f"rollout.engine_options has {unknown}: the torch engine knows {sorted(_KNOWN_OPTIONS)}")
        if spec.max_context_tokens < 8:
            raise EngineError(f"max_context_tokens is {spec.max_context_tokens}: expected at least 8")
        self._spec = spec
        self._prefill = SharedPrefill(spec.prefix_cache_bytes)
        self._tokens_per_step = int(spec.options.get("tokens_per_step", 0))
        self._step_s = float(spec.options.get("step_ms", 16.0)) / 1000
        self._hurried = False
        await self._run(self._load, spec)

    def _load(self, spec: EngineSpec) -> None:
        torch.set_num_threads(max(1, spec.threads))
        self._model = load_model(spec.model_path, spec.dtype, pick_device(spec.device))
        self._vocab = int(self._model.get_input_embeddings().weight.shape[0])
        self._slots = spec.max_running or slots_that_fit(self._model, spec)
        self._rows = RunningRows(self._slots, spec.max_context_tokens)
        side = SideAdapters(self._model)
        self._decoder = make_decoder(
            self._model,
            str(spec.options.get("decoder", "auto")),
            max_rows=self._slots,
            max_tokens=spec.max_context_tokens,
            prefill_tokens=int(spec.options.get("prefill_tokens", 8192)),
            records_routes=spec.records_routes,
            side=side,
        )
        self._weights = ServedWeights(self._model, self._decoder, side, spec, self._prefill.forget)
        with torch.inference_mode():
            try:
                self._warm_up(self._decoder)
            except (AttributeError, IndexError, KeyError, NotImplementedError, TypeError, ValueError) as error:
                raise ModelUnreadable(
                    f"{type(self._model).__name__} cannot be run token by token with a key-value cache, as the torch "
                    f"engine does ({type(error).__name__}: {error}); use rollout.engine: vllm, or another model"
                ) from error

    def _warm_up(self, decoder: Decoder) -> None:
        """Prefill and decode one token, so that thread pools, kernels and the cache exist before the first request.

        A model whose cache does not consist of keys and values fails here.
        """
        logits = decoder.prefill([np.zeros(4, np.int32)])
        draw(logits, np.full(1, 0.5), RowSampling(np.ones(1), np.ones(1), np.zeros(1, np.int64)))
        decoder.decode(np.zeros(1, np.int64), np.full(1, 5, np.int64))
        decoder.clear()

    async def _run(self, function: Callable[..., T], *args: Any) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._thread, function, *args)

    # ------------------------------------------------------------------ requests

    @property
    def slots(self) -> int:
        return self._slots

    def add(self, requests: Sequence[GenerationRequest]) -> None:
        """Queue requests.

        Raises:
            RequestRefused: names those with no prompt, with ids outside the vocabulary, or of an adapter that is not
                held. None is queued.
        """
        check_requests(requests, vocab=self._vocab)
        self._refuse_unheld(requests)
        self._tops = max([self._tops if self.has_work else 0, *(request.top_logprobs for request in requests)])
        self._waiting.extend(to_compute(requests, self._started().max_context_tokens, self._columns))

    def _refuse_unheld(self, requests: Sequence[GenerationRequest]) -> None:
        numbered = [request for request in requests if request.adapter]
        if numbered and self._served().are_adapted:
            raise EngineError("a sequence is of a numbered adapter while another one is loaded: load the bare model")
        if lost := [request.request for request in numbered if request.adapter not in self._served().side]:
            raise RequestRefused(f"request {lost[0]} is of an adapter that is not held: add it first", tuple(lost))

    def abort(self, requests: Sequence[int]) -> None:
        gone = set(requests)
        for request in [waiting for waiting in self._waiting if waiting.request in gone]:
            self._waiting.remove(request)
            self._columns.end(request.request, request.position, FinishReason.ABORTED)
        self._aborted |= gone.intersection(self._rows.requests[: self._rows.count].tolist())

    def _drop_aborted(self) -> None:
        slots = np.flatnonzero(np.isin(self._rows.requests[: self._rows.count], list(self._aborted)))
        for slot in slots:
            self._columns.end(int(self._rows.requests[slot]), int(self._rows.offsets[slot]), FinishReason.ABORTED)
        self._aborted.clear()
        self._leave(slots)
        self._arrange()

    @property
    def has_work(self) -> bool:
        return bool(self._rows.count or self._waiting or self._columns)

    def _leave(self, slots: NDArray[np.int64]) -> None:
        if not len(slots):
            return
        all_cached = self._cached == self._rows.count
        self._rows.remove(slots)
        if all_cached:  # else nothing is cached: rows are prefilled together, in a step or after a recompute
            self._cached = self._rows.count

    def _arrange(self) -> None:
        """Keep one row of the cache for each distinct sequence, and drop the rows of sequences that have left."""
        if not self._branches:
            return
        rows = self._rows
        new = rearranged(rows.branches[: rows.count], rows.last_tokens())
        rows.branches[: rows.count] = new.branches
        if len(new.sources) or new.rows != self._branches:
            self._ready().arrange(new.sources, new.targets, new.rows)
            self._branches = new.rows

    # ------------------------------------------------------------------ steps

    async def step(self) -> StepOutput:
        if self._sleeping or self._weights_lost:
            raise EngineError("step while asleep, or before the load that must follow a wake from level 2")
        self._hurried = False
        return await self._run(self._step)

    def hurry(self) -> None:
        """End the step under way; the engine's thread checks this after each token."""
        self._hurried = True

    def _step(self) -> StepOutput:
        started = perf_counter()
        with torch.inference_mode():
            if self._aborted:
                self._drop_aborted()
            done = 0
            while self._rows.count or self._waiting or not done:
                self._admit()
                if self._rows.count:
                    self._advance()
                done += 1
                if self._step_is_over(done, perf_counter() - started):
                    break
        seconds = perf_counter() - started
        output = self._columns.take(self._version, seconds)
        self._stats = EngineStats(
            running=self._rows.count,
            queued=len(self._waiting),
            kv_used_fraction=self._kv_used_fraction(),
            step_s=seconds,
            busy_s_total=self._stats.busy_s_total + seconds,
            tokens_total=self._stats.tokens_total + len(output.tokens),
            prefilled_tokens_total=self._prefill.prefilled_tokens,
            prefix_hit_tokens_total=self._begun_tokens - self._prefill.prefilled_tokens,
        )
        return output

    def _step_is_over(self, tokens: int, seconds: float) -> bool:
        if self._tokens_per_step:
            return tokens >= self._tokens_per_step
        return self._hurried or seconds >= self._step_s

    def _admit(self) -> None:
        free = self._slots - self._rows.count
        self._rows.extend([self._waiting.popleft() for _ in range(min(free, len(self._waiting)))])

    def _advance(self) -> None:
        """Add one token to each row."""
        rows = self._rows
        logits = self._logits()
        noise = uniforms(rows.keys[: rows.count], rows.offsets[: rows.count])
        tokens, logprobs = draw(logits, noise, rows.sampling())
        offsets, requests = rows.offsets[: rows.count].copy(), rows.requests[: rows.count].copy()
        asking = np.flatnonzero(rows.tops[: rows.count])
        tops = likeliest(logits, rows.sampling(), asking, self._tops) if self._tops else None
        routes = self._ready().routes[rows.branches[: rows.count]] if self._started().records_routes else None
        broken = np.flatnonzero(~np.isfinite(logprobs))
        self._cleanse(broken)
        finished = rows.record(tokens)
        self._columns.tokens(requests, offsets, tokens, logprobs, finished, routes, tops)
        self._leave(np.flatnonzero(finished))
        self._arrange()
        if len(broken):
            raise LogitsNotFinite(
                f"version {self._version} gives logits that are not finite: the weights are broken",
                tuple(requests[broken].tolist()),
            )

    def _cleanse(self, slots: NDArray[np.int64]) -> None:
        """Remove what is no number from keys and values, since those of one row lie, masked, beside a later one's."""
        for branch in np.unique(self._rows.branches[slots]).tolist():
            for part in self._ready().parts(branch):
                part.zero_()
        if len(slots):
            self._prefill.release()

    def _logits(self) -> torch.Tensor:
        """Next-token logits of all rows: decoded for those with a cache, prefilled for the others."""
        rows, parts = self._rows, list[torch.Tensor]()
        if self._cached:
            slots = self._one_slot_each()
            parts.append(self._ready().decode(rows.last_tokens()[slots], rows.lengths[slots], rows.adapters[slots]))
        if self._cached < rows.count:
            parts.append(self._begin())
        logits = parts[0] if len(parts) == 1 else torch.cat(parts)
        return logits.index_select(0, torch.from_numpy(rows.branches[: rows.count]).to(logits.device))

    def _begin(self) -> torch.Tensor:
        """Prefill the slots that have no cache, siblings together; returns the logits of their new branches."""
        rows, slots = self._rows, range(self._cached, self._rows.count)
        firsts: dict[tuple[int, bytes], int] = {}
        keys = [(int(rows.adapters[slot]), rows.sequence(slot).tobytes()) for slot in slots]
        alike = [firsts.setdefault(key, slot) for key, slot in zip(keys, slots, strict=True)]
        distinct = list(firsts.values())
        prompts = rows.prompts[distinct].tolist()
        sequences = [rows.sequence(slot) for slot in distinct]
        logits, places = self._prefill.run(self._ready(), sequences, prompts, rows.adapters[distinct])
        branch_of = dict(zip(distinct, (self._branches + places).tolist(), strict=True))
        rows.branches[self._cached : rows.count] = [branch_of[first] for first in alike]
        self._begun_tokens += int(rows.lengths[self._cached : rows.count].sum())
        self._cached = rows.count
        self._branches += len(distinct)
        return logits

    def _one_slot_each(self) -> NDArray[np.int64]:
        return one_slot_each(self._rows.branches[: self._cached], self._branches)

    def _kv_used_fraction(self) -> float:
        used_tokens = self._rows.lengths[self._one_slot_each()].sum() if self._branches else 0
        return float(used_tokens) / (self._slots * self._started().max_context_tokens)

    # ------------------------------------------------------------------ weights and memory

    async def load_weights(
        self,
        tensors: WeightTensors,
        dtypes: Mapping[str, str],
        policy_version: int,
        *,
        in_flight: Literal["keep", "recompute"],
    ) -> None:
        await self._serve(policy_version, self._served().load_version, tensors, dtypes)
        self._weights_lost = False
        if in_flight == "recompute":
            self._forget_cache()

    async def load_adapter(
        self, tensors: WeightTensors, dtypes: Mapping[str, str], policy_version: int, spec: AdapterSpec | None
    ) -> None:
        if self._weights_lost:
            raise EngineError("load_adapter before the load of a model that must follow a wake from level 2")
        await self._serve(policy_version, self._served().load_adapter, tensors, dtypes, spec)
        self._forget_cache()

    async def load_model(self, directory: Path, policy_version: int) -> None:
        await self._serve(policy_version, self._served().load_model, directory)
        self._weights_lost = False
        self._forget_cache()

    async def _serve(self, policy_version: int, load: Callable[..., None], *args: Any) -> None:
        if self._sleeping:
            raise EngineError("weights are loaded while asleep: wake first")
        await self._run(load, *args)
        self._version = policy_version

    @property
    def holds_adapters(self) -> bool:
        return self._weights is not None and self._weights.side.possible

    async def add_adapter(
        self, number: int, tensors: WeightTensors, dtypes: Mapping[str, str], spec: AdapterSpec
    ) -> None:
        await self._run(self._served().side.add, number, tensors, dtypes, spec)

    async def drop_adapter(self, number: int) -> None:
        if number in self._rows.adapters[: self._rows.count] or any(one.adapter == number for one in self._waiting):
            raise EngineError(f"adapter {number} is dropped while sequences of it run or wait")
        await self._run(self._served().side.drop, number)

    async def score(self, prompt: NDArray[np.int32], top_k: int, adapter: int = 0) -> PromptScores:
        if self._sleeping or self._weights_lost:
            raise EngineError("score while asleep, or before the load that must follow a wake from level 2")
        return await self._run(self._served().scorer.score, prompt, top_k, adapter)

    @property
    def vocab(self) -> int:
        return self._vocab

    def _forget_cache(self) -> None:
        self._cached = self._branches = 0
        self._ready().clear()

    @property
    def policy_version(self) -> int:
        return self._version

    async def sleep(self, level: int) -> None:
        """Level 1 frees the cache (and moves CUDA weights to the host), 2 drops the weights too. Sequences survive."""
        if self._sleeping:
            return
        self._sleeping = True
        await self._run(self._fall_asleep, level)

    def _fall_asleep(self, level: int) -> None:
        self._forget_cache()
        self._prefill.release()
        self._weights_lost |= level >= 2
        self._served().fall_asleep(level)

    async def wake(self) -> None:
        if self._sleeping:
            await self._run(self._served().wake)
            self._sleeping = False

    def stats(self) -> EngineStats:
        return self._stats

    async def close(self) -> None:
        await self._run(self._release)
        self._thread.shutdown(wait=False)

    def _release(self) -> None:
        self._model = self._decoder = self._weights = None
        self._prefill.release()
        self._rows, self._cached, self._branches = RunningRows(1, 1), 0, 0
        self._waiting.clear()

    def _started(self) -> EngineSpec:
        if self._spec is None:
            raise EngineError("the engine has not been started")
        return self._spec

    def _served(self) -> ServedWeights:
        if self._weights is None:
            raise EngineError("the engine has not been started, or was closed")
        return self._weights

    def _ready(self) -> Decoder:
        if self._decoder is None:
            raise EngineError("the engine has not been started, or was closed")
        return self._decoder
