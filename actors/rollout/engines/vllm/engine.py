"""The vLLM engine: real work on CUDA, and the same code on a CPU.

    event loop                                    the engine's thread (one)
    add, abort ──▶ incoming, aborted lists
    step ─────────────────────────────────────▶  drop aborted · submit incoming · core.step() … ──▶ rows
    load_weights ─────────────────────────────▶  check · reload in place · resubmit what must not use old KV
    sleep, wake ──────────────────────────────▶  take everything out of the core · free · build or refill

Invariants beyond the protocol's
- The event loop's side knows all tokens of every unfinished sequence. So any sequence can be taken out of vLLM (for a
  new version or a sleep) and submitted again as a new request, whose prompt is all tokens so far.
- The id of a request in vLLM is never reused: it is our request number plus a count.

``EngineSpec.options`` are arguments of vLLM's ``EngineArgs`` (``gpu_memory_utilization``, ``kv_cache_memory_bytes``,
``enforce_eager`` …), and ``step_ms``: a ``step`` makes one step of vLLM after the other until that much time has
passed or a sequence has ended, default 50. That makes fewer, bigger messages and fewer changes of thread; where one
step of vLLM takes as long, it is the whole step. ``hurry`` ends a step after the present step of vLLM.

Sampling noise is a function of (seed, prompt, sibling, position); see ``core.py``.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import chain
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Literal, TypeVar

import numpy as np

from actors.protocol.tokens import FinishReason
from actors.protocol.work import EngineStats
from actors.rollout.engine import EngineSpec, GenerationRequest, StepOutput, WeightTensors, slots_of
from actors.rollout.engines.adapter_tensors import AdapterTensors
from actors.rollout.engines.requests import check_requests, to_compute
from actors.rollout.engines.step_columns import StepColumns
from actors.rollout.engines.step_stats import StepStats
from actors.rollout.engines.vllm import ranks
from actors.rollout.engines.vllm.setup import step_seconds
from actors.rollout.errors import EngineError, EngineUnavailable, RequestRefused, WeightsMismatch

if TYPE_CHECKING:
    from actors.rollout.engines.vllm.core import CoreRows, VllmCore
    from actors.rollout.engines.vllm.weights import Expected

T = TypeVar("T")

_FINISHED = {"stop": FinishReason.STOP, "length": FinishReason.LENGTH}
"""Our finish reason for each of vLLM's."""


@dataclasses.dataclass(slots=True)
class _Unfinished:
    """Holds one sequence that has not ended. ``tokens`` are the prompt's and the response's."""

    request: GenerationRequest
    tokens: list[int]
    core_id: str = ""

    @property
    def position(self) -> int:
        """Position of the token that comes next."""
        return self.request.first + len(self.tokens) - len(self.request.prompt_ids)


class VllmEngine:
    """Implements ``RolloutEngine`` over vLLM's EngineCore in this process."""

    kind = "vllm"

    def __init__(self) -> None:
        self._spec: EngineSpec | None = None
        self._thread: ThreadPoolExecutor | None = None
        self._core: VllmCore | None = None
        self._place: ranks.RankPlace | None = None
        """Place among the ranks that compute together; None: this one computes alone."""
        self._expected: Expected | AdapterTensors | None = None
        self._version = 0
        self._loads = 0
        self._sequences: dict[int, _Unfinished] = {}
        self._by_core_id: dict[str, _Unfinished] = {}
        self._incoming: list[_Unfinished] = []
        self._columns = StepColumns()
        self._slots = 1
        self._step_s = 0.0
        self._hurried = False
        self._dropped: list[str] = []
        self._submitted = 0
        self._asleep = 0
        self._torn = ""
        self._stats = StepStats()

    # ------------------------------------------------------------ life

    async def start(self, spec: EngineSpec) -> None:
        if spec.tensor_parallel > 1 and self._place is None:
            raise EngineUnavailable(f"rollout.tensor_parallel is {spec.tensor_parallel}: no other ranks are here")
        self._spec = spec
        self._step_s = step_seconds(spec)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="vllm")
        try:
            await self._run(self._build, spec)
        except BaseException:
            self._thread.shutdown(wait=False)
            self._thread = None
            raise
        self._version = 0
        self._stats.last_end_s = asyncio.get_running_loop().time()

    def take_place(self, place: ranks.RankPlace) -> None:
        """Make this engine one rank of several. Called before ``start``."""
        self._place = place

    def meet_at(self, directory: Path) -> None:
        """Set the ``directory`` where the ranks meet again after a sleep. Called before ``wake``."""
        assert self._place is not None, "it has been started"
        self._place = dataclasses.replace(self._place, directory=directory)

    def _build(self, spec: EngineSpec) -> None:
        """Build the core. Runs on the engine's thread."""
        from actors.rollout.engines.vllm.core import VllmCore
        from actors.rollout.engines.vllm.expected import expected_of
        from actors.rollout.engines.vllm.reload_probe import check_reload

        self._expected = expected_of(spec)
        self._core = VllmCore(spec, self._expected, self._place)
        if self._place is None and self._core.adapters is None:
            try:
                check_reload(self._core, spec)
            except BaseException:
                self._core.close()
                self._core = None
                raise
        kv_tokens, context = self._core.kv_tokens, self._core.context_tokens
        self._slots = spec.max_running or slots_of(kv_tokens, context, sets_aside=True)

    async def close(self) -> None:
        core, self._core = self._core, None
        if core is not None:
            await self._run(core.close)
        if self._thread is not None:
            self._thread.shutdown(wait=False)
            self._thread = None

    async def _run(self, function: Callable[..., T], *arguments: object) -> T:
        if self._thread is None:
            raise EngineError("the vLLM engine is not started")
        return await asyncio.get_running_loop().run_in_executor(self._thread, function, *arguments)

    # ------------------------------------------------------------ requests

    @property
    def slots(self) -> int:
        return self._slots

    def add(self, requests: Sequence[GenerationRequest]) -> None:
        if in_use := [request.request for request in requests if request.request in self._sequences]:
            raise RequestRefused(f"request {in_use[0]}: a sequence of that number has not ended", tuple(in_use))
        check_requests(requests, vocab=self._live_core.vocabulary)
        for request in to_compute(requests, self._live_core.context_tokens, self._columns):
            sequence = _Unfinished(request, [*request.prompt_ids.tolist(), *request.generated.tolist()])
            self._sequences[request.request] = sequence
            self._incoming.append(sequence)

    def _budget(self, sequence: _Unfinished) -> int:
        """Number of tokens that this sequence may still get."""
        return min(sequence.request.end - sequence.position, self._live_core.context_tokens - len(sequence.tokens))

    def abort(self, requests: Sequence[int]) -> None:
        gone = [sequence for number in requests if (sequence := self._sequences.pop(int(number), None)) is not None]
        for sequence in gone:
            self._columns.end(sequence.request.request, sequence.position, FinishReason.ABORTED)
            if sequence.core_id:
                self._dropped.append(sequence.core_id)
                del self._by_core_id[sequence.core_id]
        left_out = set(map(id, gone))
        self._incoming = [sequence for sequence in self._incoming if id(sequence) not in left_out]

    @property
    def has_work(self) -> bool:
        return bool(self._sequences or self._columns)

    # ------------------------------------------------------------ a step

    async def step(self) -> StepOutput:
        self._check_step()
        loop = asyncio.get_running_loop()
        began = loop.time()
        self._hurried = False
        steps = await self._run(self._step_on_thread)
        ended = loop.time()
        self._take(steps)
        output = self._columns.take(self._version, ended - began)
        self._count(began, ended, len(output.tokens), steps)
        return output

    def _check_step(self) -> None:
        if self._torn:
            raise EngineError(f"the weights are torn ({self._torn}); a load must succeed before the next step")
        if self._asleep:
            raise EngineError("the vLLM engine is asleep; wake it first")

    def hurry(self) -> None:
        """End the step under way; the engine's thread checks this after each step of vLLM."""
        self._hurried = True

    def _step_on_thread(self) -> list[CoreRows]:
        """Make steps of vLLM until one of them ends a sequence, ``hurry`` is called, or the time is up."""
        self._sync_core()
        steps: list[CoreRows] = []
        began_s = perf_counter()
        while self._by_core_id:
            steps.append(self._live_core.step())
            if not self._goes_on(bool(steps[-1].ended), perf_counter() - began_s):
                break
        return steps

    def _goes_on(self, ended: bool, seconds: float) -> bool:
        """Whether our step, after ``seconds`` and perhaps an ``ended`` sequence, makes one more step of vLLM."""
        return not (ended or self._hurried or seconds >= self._step_s)

    def _sync_core(self) -> None:
        """Drop the requests from vLLM that were aborted, and submit those that were added."""
        if self._dropped:
            self._live_core.drop(self._dropped)
            self._dropped = []
        for sequence in self._incoming:
            self._submit(sequence)
        self._incoming = []

    def _submit(self, sequence: _Unfinished) -> None:
        request = sequence.request
        self._submitted += 1
        sequence.core_id = f"{request.request}.{self._submitted}"
        self._by_core_id[sequence.core_id] = sequence
        self._live_core.submit(
            sequence.core_id,
            list(sequence.tokens),
            request.sampling,
            origin=(request.prompt, request.sibling),
            start=sequence.position,
            context=max(0, request.first - len(request.prompt_ids)),
            budget=self._budget(sequence),
            salt=f"{self._version}.{self._loads}",
        )

    def _take(self, steps: Sequence[CoreRows]) -> None:
        """Enter ``steps`` into the columns and our sequences. Most steps have the same sequences as the one before."""
        core_ids, sequences = list[str](), list[_Unfinished]()
        requests = offsets = np.empty(0, np.int64)
        for rows in steps:
            if rows.core_ids != core_ids:
                core_ids, sequences = rows.core_ids, [self._by_core_id[core_id] for core_id in rows.core_ids]
                requests = np.array([sequence.request.request for sequence in sequences], np.int64)
                offsets = np.array([sequence.position for sequence in sequences], np.int64)
            offsets = self._enter(rows, requests, offsets)
            for sequence, tokens in zip(sequences, rows.tokens, strict=True):
                sequence.tokens += tokens
            for core_id in rows.ended:
                del self._sequences[self._by_core_id.pop(core_id).request.request]

    def _enter(self, rows: CoreRows, requests: np.ndarray, offsets: np.ndarray) -> np.ndarray:
        """Enter one step of vLLM into the columns, from each request's offset on; returns the offsets after it."""
        finished = np.zeros(len(requests), np.uint8)
        for core_id, reason in rows.ended.items():
            row = rows.core_ids.index(core_id)
            finished[row] = _FINISHED[reason]
            if not rows.tokens[row]:
                self._columns.end(int(requests[row]), int(offsets[row]), _FINISHED[reason])
        counts = np.fromiter(map(len, rows.tokens), np.int64, len(requests))
        of = np.repeat(np.arange(len(requests)), counts)
        behind = np.arange(len(of)) - np.repeat(np.cumsum(counts) - counts, counts)
        tokens = np.fromiter(chain.from_iterable(rows.tokens), np.int64, len(of))
        self._columns.tokens(requests[of], offsets[of] + behind, tokens, rows.logprobs, finished[of])
        return offsets + counts

    def _count(self, began: float, ended: float, tokens: int, steps: Sequence[CoreRows]) -> None:
        running, queued, used = self._live_core.gauges()
        self._stats.count(
            began,
            ended,
            running=running,
            queued=queued,
            kv_used_fraction=used,
            tokens=tokens,
            prefilled_tokens=sum(rows.prefilled_tokens for rows in steps),
            prefix_hit_tokens=sum(rows.prefix_hit_tokens for rows in steps),
            preemptions=sum(rows.preemptions for rows in steps),
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
        self._check_load(tensors, dtypes)
        await self._run(self._load_on_thread, tensors, policy_version, in_flight)

    def _check_load(self, tensors: WeightTensors, dtypes: Mapping[str, str]) -> None:
        if self._asleep:
            raise EngineError("the vLLM engine is asleep; wake it before weights are loaded")
        assert self._expected is not None
        self._expected.check(tensors, dtypes)

    def _all_agree(self, well: bool) -> bool:
        """Whether ``well`` holds in every rank."""
        return well if self._place is None else ranks.all_agree(well)

    def _load_on_thread(self, tensors: WeightTensors, policy_version: int, in_flight: str) -> None:
        core = self._live_core
        if core.adapters is not None and in_flight == "keep" and self._by_core_id:
            raise EngineError(
                "rollout.in_flight is keep: vLLM binds a sequence to one version of an adapter; use recompute"
            )
        can_undo = not self._torn
        self._torn = "a load is under way"
        try:
            name = f"{policy_version}.{self._loads + 1}"
            core.load(tensors, name=name, can_undo=can_undo, all_agree=self._all_agree)
        except Exception as error:
            self._torn = "" if can_undo else "the last load failed"
            raise WeightsMismatch(
                f"vLLM could not load version {policy_version}: {type(error).__name__}: {error}"
            ) from error
        self._torn = ""
        self._version = policy_version
        self._loads += 1
        stale = [s for s in self._by_core_id.values() if in_flight == "recompute" or core.not_begun(s.core_id)]
        self._resubmit(stale)

    def _resubmit(self, sequences: Sequence[_Unfinished]) -> None:
        """Take sequences out of vLLM and queue them anew, under the present version's part of the prefix cache."""
        self._withdraw(sequences)
        self._incoming = [*sequences, *self._incoming]

    def _withdraw(self, sequences: Sequence[_Unfinished]) -> None:
        self._dropped.extend(sequence.core_id for sequence in sequences)
        for sequence in sequences:
            del self._by_core_id[sequence.core_id]
            sequence.core_id = ""

    # ------------------------------------------------------------ memory

    async def sleep(self, level: int) -> None:
        """Level 1 frees the KV cache (and, on CUDA, moves the weights to the host); 2 drops the weights as well.

        vLLM's own sleep on a CPU reports success and does nothing, so there level 1 frees the cache's storage and
        level 2 takes the whole engine down. Unfinished sequences are prefilled anew after ``wake``.
        """
        self._check_level(level)
        if not self._asleep:
            await self._run(self._sleep_on_thread, level)
            self._asleep = level

    def _check_level(self, level: int) -> None:
        if level not in (1, 2):
            raise EngineError(
                f"sleep level {level} is unknown; use 1 (weights kept on the host) or 2 (weights dropped)"
            )

    def _sleep_on_thread(self, level: int) -> None:
        core = self._live_core
        self._resubmit(list(self._by_core_id.values()))
        core.drop(self._dropped)
        self._dropped = []
        if not core.on_cpu:
            core.sleep(level if core.adapters is None else 1)  # no version brings the model itself back
        elif level == 1:
            core.release_kv_cache()
        else:
            core.close()
            self._core = None

    async def wake(self) -> None:
        if self._asleep:
            await self._run(self._wake_on_thread)
            self._asleep = 0

    def _wake_on_thread(self) -> None:
        assert self._spec is not None
        if self._core is None:
            self._build(self._spec)
        elif self._core.on_cpu:
            self._core.restore_kv_cache()
        else:
            self._core.wake()
        if self._asleep == 2:
            self._torn = "sleep level 2 dropped them"

    @property
    def _live_core(self) -> VllmCore:
        if self._core is None:
            raise EngineError("the vLLM engine is not running")
        return self._core
