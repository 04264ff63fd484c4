"""The simulated engine: the whole protocol without a model. Costs follow a linear model on the event loop's clock.

A step that decodes ``n`` sequences and prefills ``p`` tokens of new ones, none of them shared, takes

    step_s = base_s + decode_s · n + prefill_s · p          (the PTL model: latency affine in batch and prefill tokens)

and sleeps that long with ``asyncio.sleep``, so under a virtual-time loop it costs nothing. Of several ranks the first
holds the sequences, and every rank sleeps through each call (``ranks/simulated.py``).

Invariants
- Tokens and lengths are functions of (seed, prompt, sibling, position): equal on every worker and after a move.
- A response's length is drawn once per sample, ``1 + floor(-mean · ((1 - a) ln u + a ln v))`` with u of the sample and
  v of its prompt's tokens, the same in each epoch, and cut at ``max_tokens``. With ``length_cv`` it is log-normal with
  that coefficient of variation instead, and ``length_tail`` of the samples, whatever their prompt, are of 3 to 7 times
  the mean. The last token of a response that ends by itself is its first stop token; without stop tokens it runs to its
  budget. Each token of a turn of an episode ends it with a probability of one by the mean.

Options (``EngineSpec.options``): ``base_s`` 0.01, ``decode_s`` 1e-4, ``prefill_s`` 1e-5, ``start_s`` 0 (to start the
engine, as if a model were read), ``load_s`` 0.05 (to load a version), ``wake_s`` 0, ``mean_tokens`` 64, ``by_prompt`` 0
(a: share of a length that its prompt decides, at most 1), ``length_cv`` 0, ``length_tail`` 0, ``vocab`` 256,
``kv_tokens`` 0 (waiting requests start while the cache holds fewer tokens than this; 0: as ``max_running`` allows),
``preempts`` 0 (1: while it holds more, the youngest sequences are set aside, and prefilled again when there is room).
"""

from __future__ import annotations

import asyncio
import math
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import NormalDist
from typing import Literal

import numpy as np
import xxhash

from actors.models.adapter import AdapterSpec
from actors.protocol.tokens import FinishReason
from actors.protocol.work import EngineStats
from actors.ranks.followers import Followers
from actors.ranks.simulated import SimulatedRanks
from actors.rollout.engine import (
    SLOTS_MAX,
    EngineSpec,
    GenerationRequest,
    PromptScores,
    StepOutput,
    WeightTensors,
    slots_of,
)
from actors.rollout.engines.requests import check_requests, to_compute
from actors.rollout.engines.step_columns import StepColumns
from actors.rollout.errors import EngineError, EngineUnavailable, WeightsMismatch
from actors.rollout.sampling import stream_keys, uniforms
from configs.limits import Limits

_DEFAULTS = {
    "base_s": 0.01, "decode_s": 1e-4, "prefill_s": 1e-5, "start_s": 0.0, "load_s": 0.05, "wake_s": 0.0,
    "mean_tokens": 64.0, "by_prompt": 0.0, "length_cv": 0.0, "length_tail": 0.0, "vocab": 256.0, "kv_tokens": 0.0,
    "preempts": 0.0,
}  # fmt: skip
_LENGTH_POSITION = -1
"""The noise position that decides a response's length; token positions start at 0."""
_TAIL_POSITION = -2
"""The noise position that decides whether a response belongs to the tail, and how long it is then."""
_TURN_POSITION = -3
"""The first of the noise positions, counted downwards, that decide whether a token ends a turn."""
_TAIL_MEANS = (3.0, 7.0)
"""Range of a tail length in multiples of the mean: for 280 tokens, 840 to 1,960, as 1 % of responses to GSM8K have."""
_ALL_SIBLINGS = -1
"""The sibling whose noise stands for the prompt; real ones start at 0."""


class _Running:
    """Follows one sequence in flight."""

    def __init__(self, request: GenerationRequest, options: Mapping[str, float], max_context_tokens: int) -> None:
        sampling = request.sampling
        self.request, self.offset = request.request, request.position
        self._key = stream_keys(sampling.seed, request.prompt, request.sibling)
        self._vocab, self._stops = int(options["vocab"]), sampling.stop_token_ids
        self.budget = min(request.end, request.first + max_context_tokens - len(request.prompt_ids))
        self._before = len(request.prompt_ids) - request.first
        """Number of tokens that the context up to a position has beyond that position."""
        drawn = self._stops and not request.limit
        self._length = _drawn_length(request, self._key, options) if drawn else self.budget
        self._end_chance = 1 / options["mean_tokens"] if request.limit and self._stops else 0.0

    @property
    def context_tokens(self) -> int:
        """Number of tokens in the sequence's cache; before its first step, the number to prefill."""
        return self._before + self.offset

    def next_token(self) -> tuple[int, FinishReason]:
        """The token at ``offset``, and its finish reason."""
        self.offset += 1
        if self._ends():
            return self._stops[0], FinishReason.STOP
        token = int(uniforms(self._key, self.offset - 1)[0] * self._vocab)
        while token in self._stops:
            token = (token + 1) % self._vocab
        return token, FinishReason.LENGTH if self.offset >= self.budget else FinishReason.RUNNING

    def _ends(self) -> bool:
        """Whether the sequence ends itself with the token before ``offset``."""
        if self._end_chance:
            return bool(uniforms(self._key, _TURN_POSITION - self.offset)[0] < self._end_chance)
        return bool(self._stops) and self.offset >= self._length


def _drawn_length(request: GenerationRequest, key: np.ndarray, options: Mapping[str, float]) -> int:
    by_prompt, of_sample, of_prompt = options["by_prompt"], uniforms(key, _LENGTH_POSITION)[0], 0.5
    if by_prompt:
        text = xxhash.xxh3_64_intdigest(np.ascontiguousarray(request.prompt_ids, "<i4").tobytes()) >> 1
        of_prompt = uniforms(stream_keys(request.sampling.seed, text, _ALL_SIBLINGS), _LENGTH_POSITION)[0]
    if options["length_cv"]:
        return _log_normal(of_sample, of_prompt, uniforms(key, _TAIL_POSITION)[0], options)
    drawn = (1 - by_prompt) * math.log(of_sample) + by_prompt * math.log(of_prompt)
    return 1 + int(-options["mean_tokens"] * drawn)


def _log_normal(of_sample: float, of_prompt: float, of_tail: float, options: Mapping[str, float]) -> int:
    mean, by_prompt, tail = options["mean_tokens"], options["by_prompt"], options["length_tail"]
    if of_tail < tail:
        least, most = _TAIL_MEANS
        return int(mean * (least + (most - least) * of_tail / tail))
    sigma = math.sqrt(math.log1p(options["length_cv"] ** 2))
    normal = NormalDist().inv_cdf
    drawn = math.sqrt(1 - by_prompt**2) * normal(of_sample) + by_prompt * normal(of_prompt)
    return 1 + int(mean * math.exp(sigma * drawn - sigma**2 / 2))


def whole_response(request: GenerationRequest, options: Mapping[str, float], max_context_tokens: int) -> list[int]:
    """The tokens that every simulated engine with these ``options`` generates for ``request``, also after moves."""
    costs = _DEFAULTS | dict(options)
    running = _Running(request, costs, max_context_tokens)
    tokens: list[int] = []
    finished = FinishReason.RUNNING
    while finished is FinishReason.RUNNING:
        token, finished = running.next_token()
        tokens.append(token)
    return tokens


class SimulatedEngine:
    """Implements ``RolloutEngine``; see the module's docstring."""

    kind = "simulated"
    tells_top_logprobs = False

    def __init__(self, ranks: SimulatedRanks | None = None) -> None:
        """``ranks``: the group whose first rank this engine is; None: it computes alone."""
        self._ranks = ranks or SimulatedRanks()
        self._spec: EngineSpec | None = None
        self._costs = dict(_DEFAULTS)
        self._waiting: deque[GenerationRequest] = deque()
        self._running: dict[int, _Running] = {}
        self._aside: list[_Running] = []
        """Sequences that were set aside, the youngest first."""
        self._columns = StepColumns()
        self._shapes: dict[str, tuple[int, ...]] | None = None
        self._version, self._level, self._weights_lost = 0, 0, False
        self._stats = EngineStats()

    async def start(self, spec: EngineSpec) -> None:
        if unknown := sorted(set(spec.options) - set(_DEFAULTS)):
            raise EngineUnavailable(
                f"rollout.engine_options has {unknown}: the simulated engine knows {sorted(_DEFAULTS)}"
            )
        if spec.tensor_parallel != self._ranks.count:
            raise EngineUnavailable(
                f"rollout.tensor_parallel is {spec.tensor_parallel}, and {self._ranks.count} ranks are there"
            )
        self._spec = spec
        self._costs |= {name: float(value) for name, value in spec.options.items()}
        await self._ranks.tell("start")
        if self._costs["start_s"] > 0:
            await asyncio.sleep(self._costs["start_s"])

    @property
    def slots(self) -> int:
        spec, kv_tokens = self._started(), self._costs["kv_tokens"]
        if spec.max_running or not kv_tokens:
            return spec.max_running or SLOTS_MAX
        return slots_of(kv_tokens, spec.max_context_tokens, sets_aside=True)

    def add(self, requests: Sequence[GenerationRequest]) -> None:
        check_requests(requests, vocab=int(self._costs["vocab"]))
        self._waiting.extend(to_compute(requests, self._started().max_context_tokens, self._columns))

    def abort(self, requests: Sequence[int]) -> None:
        gone = set(requests)
        for waiting in [request for request in self._waiting if request.request in gone]:
            self._columns.end(waiting.request, waiting.position, FinishReason.ABORTED)
        self._waiting = deque(request for request in self._waiting if request.request not in gone)
        for running in [running for running in self._aside if running.request in gone]:
            self._columns.end(running.request, running.offset, FinishReason.ABORTED)
        self._aside = [running for running in self._aside if running.request not in gone]
        for request in gone & self._running.keys():
            self._columns.end(request, self._running.pop(request).offset, FinishReason.ABORTED)

    @property
    def has_work(self) -> bool:
        return bool(self._running or self._waiting or self._aside or self._columns)

    def hurry(self) -> None:
        """Do nothing: a step is one token."""

    async def step(self) -> StepOutput:
        if self._level or self._weights_lost:
            raise EngineError("step while asleep, or before the load that must follow a wake from level 2")
        costs = self._costs
        preempted = self._preempt() if costs["preempts"] and costs["kv_tokens"] else 0
        again = 0 if preempted else self._take_back()
        prefill = 0 if self._aside else self._admit()
        prefilled = self._stats.prefilled_tokens_total + prefill
        seconds = costs["base_s"] + costs["decode_s"] * len(self._running) + costs["prefill_s"] * (prefill + again)
        if self._running:
            await self._ranks.spend("step", seconds, repr((len(self._running), len(self._waiting))).encode())
        self._advance()
        output = self._columns.take(self._version, seconds)
        self._stats = EngineStats(
            running=len(self._running),
            queued=len(self._waiting) + len(self._aside),
            kv_used_fraction=len(self._running) / self.slots,
            step_s=seconds,
            busy_s_total=self._stats.busy_s_total + seconds,
            tokens_total=self._stats.tokens_total + len(output.tokens),
            prefilled_tokens_total=prefilled,
            preemptions_total=self._stats.preemptions_total + preempted,
        )
        return output

    def _held(self) -> int:
        """Tokens in the cache."""
        return sum(running.context_tokens for running in self._running.values())

    def _preempt(self) -> int:
        """Set the youngest sequences aside until the cache holds the others, but not the last one; their number."""
        count = 0
        while len(self._running) > 1 and self._held() > self._costs["kv_tokens"]:
            self._aside.append(self._running.pop(next(reversed(self._running))))
            count += 1
        return count

    def _take_back(self) -> int:
        """Go on with sequences that fit again, the oldest first; returns their tokens, which are prefilled anew."""
        prefill, room = 0, self._costs["kv_tokens"] - self._held()
        while self._aside and (not self._running or prefill + self._aside[-1].context_tokens < room):
            running = self._aside.pop()
            self._running[running.request] = running
            prefill += running.context_tokens
        return prefill

    def _admit(self) -> int:
        """Start waiting requests while there is room; returns their prefix tokens."""
        spec, prefill, most = self._started(), 0, self._costs["kv_tokens"] or math.inf
        held = self._held() if most < math.inf else 0
        while self._waiting and len(self._running) < self.slots and held + prefill < most:
            request = self._waiting.popleft()
            running = _Running(request, self._costs, spec.max_context_tokens)
            self._running[request.request] = running
            prefill += running.context_tokens
        return prefill

    def _advance(self) -> None:
        if not self._running:
            return
        rows = [(running.request, running.offset, *running.next_token()) for running in self._running.values()]
        requests, offsets, tokens, finished = (np.array(column, np.int64) for column in zip(*rows, strict=True))
        logprobs = np.full(len(rows), -math.log(self._costs["vocab"]), np.float32)
        self._columns.tokens(requests, offsets, tokens, logprobs, finished.astype(np.uint8))
        for request in requests[finished != 0]:
            del self._running[int(request)]

    async def load_weights(
        self,
        tensors: WeightTensors,
        dtypes: Mapping[str, str],
        policy_version: int,
        *,
        in_flight: Literal["keep", "recompute"],
    ) -> None:
        """The first load fixes names and shapes; later ones must match them."""
        if self._level:
            raise EngineError("load_weights while asleep: wake first")
        shapes = {name: tuple(array.shape) for name, array in tensors.items()}
        if self._shapes is not None and shapes != self._shapes:
            changed = sorted(name for name, _ in shapes.items() ^ self._shapes.items())
            raise WeightsMismatch(f"names or shapes differ from those of the first version: {', '.join(changed[:3])}")
        await self._ranks.spend("load", self._costs["load_s"], repr((policy_version, in_flight)).encode())
        self._shapes, self._version, self._weights_lost = shapes, policy_version, False

    async def load_adapter(
        self, tensors: WeightTensors, dtypes: Mapping[str, str], policy_version: int, spec: AdapterSpec | None
    ) -> None:
        await self._serve(policy_version)

    async def load_model(self, directory: Path, policy_version: int) -> None:
        await self._serve(policy_version)

    async def _serve(self, policy_version: int) -> None:
        """Serve anything as a version: tokens do not depend on weights."""
        if self._level:
            raise EngineError("weights are loaded while asleep: wake first")
        await self._ranks.spend("load", self._costs["load_s"], repr(policy_version).encode())
        self._version, self._weights_lost = policy_version, False

    async def score(self, prompt: np.ndarray, top_k: int) -> PromptScores:
        """All tokens are equally likely."""
        await self._ranks.spend("score", self._costs["prefill_s"] * len(prompt))
        shape, known = (len(prompt), top_k), np.full(len(prompt), -math.log(self._costs["vocab"]), np.float32)
        known[0] = np.nan
        top_ids = np.broadcast_to(np.arange(top_k, dtype=np.int32), shape).copy()
        top_ids[0] = -1
        return PromptScores(logprobs=known, top_ids=top_ids, top_logprobs=np.broadcast_to(known[:, None], shape).copy())

    @property
    def vocab(self) -> int:
        return int(self._costs["vocab"])

    @property
    def policy_version(self) -> int:
        return self._version

    async def sleep(self, level: int) -> None:
        await self._ranks.tell("sleep", bytes([level]))
        self._level = max(self._level, level)

    async def wake(self) -> None:
        if self._level and (self._costs["wake_s"] > 0 or self._ranks.count > 1):
            await self._ranks.spend("wake", self._costs["wake_s"])
        self._weights_lost = self._weights_lost or self._level >= 2
        self._level = 0

    def stats(self) -> EngineStats:
        return self._stats

    async def close(self) -> None:
        self._running.clear()
        self._aside.clear()
        self._waiting.clear()
        await self._ranks.close()

    def _started(self) -> EngineSpec:
        if self._spec is None:
            raise EngineError("the engine has not been started")
        return self._spec


def leading_engine(followers: Followers, limits: Limits) -> SimulatedEngine:
    """The engine of the first of several ranks."""
    return SimulatedEngine(SimulatedRanks(followers, limits.engine_step_s))
