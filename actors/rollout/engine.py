"""The interface of the rollout engine that a worker drives. Kinds in ``engines/``: torch, vllm, simulated.

Invariants (asserted for every kind by ``tests/contracts/test_rollout_engine_contract.py``)
- The caller awaits one method at a time; between two ``step`` calls nothing moves, so a weight load, an abort
  and a new request all take effect between engine steps.
- Every request that is added ends with exactly one row whose finish reason is not RUNNING; no row follows it.
- ``logprobs`` are of the distribution that the token was drawn from (after temperature, top-k and top-p).
- A request with ``generated`` tokens is continued after them; its first row has ``offset == first + len(generated)``.
- The noise of a token is a function of (seed, prompt, sibling, position), whatever its adapter. A stop token that an
  episode's environment wrote ends no turn.
- ``load_weights`` is all or nothing: on any error the engine still serves the version that it served before.
- Rows carry the version that computed them; the prefix cache never crosses versions or adapters.
- ``stats`` count the tokens that prefill computed and those that the prefix cache had. They add up to the tokens of
  every sequence that began, or began again after a load with ``recompute`` or after a sleep.
- Blocking work runs off the event loop.

    start → [ add* · abort* · load_weights* · step ]* → close
                sleep(level) ⇄ wake between any two

What an engine may have beyond that: ``SnapshotEngine``, one snapshot after the other; ``AdapterEngine``, many adapters
side by side.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Literal, Protocol, TypeGuard

import numpy as np

from actors.models.adapter import AdapterSpec
from actors.protocol.work import EngineStats, SamplingParams
from configs.limits import DEFAULT_LIMITS

SLOTS_MAX: Final = 256
"""Most sequences that an engine takes by its own account: beyond it steps get longer, and hardly more is generated."""


def slots_of(kv_tokens: float, max_context_tokens: int, *, sets_aside: bool) -> int:
    """The engine's own account: sequences for a memory of ``kv_tokens`` tokens. ``sets_aside``: see ``slots``."""
    return int(max(1, min(SLOTS_MAX, (1 + sets_aside) * kv_tokens // max_context_tokens)))


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineSpec:
    """All that an engine needs to start. ``model_path`` is an HF directory (config, tokenizer, safetensors)."""

    model_path: Path
    dtype: str = "float32"
    device: str = "cpu"
    max_running: int = 64
    """Sequences decoded together; 0: as many as the engine has memory for (``RolloutEngine.slots``)."""
    memory_share: float = 1.0
    """Share of a CPU's free memory that the engine may count on, since other processes want some too."""
    max_context_tokens: int = 1024
    """Tokens of prompt plus response, at most."""
    threads: int = 1
    seed: int = 0
    prefix_cache_bytes: int = DEFAULT_LIMITS.prefix_cache_bytes
    """Memory for the prefix cache, in engines that do not size it themselves."""
    tensor_parallel: int = 1
    """Ranks that compute one step together, each with a part of every layer."""
    adapter: AdapterSpec | None = None
    """Shape of the versions if they are adapters of the model in ``model_path``; None: versions are models."""
    records_routes: bool = False
    """Whether steps say which experts have predicted each token. For engines that can."""
    options: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """Options that are passed through to the engine kind; each documents its own."""


@dataclass(frozen=True, kw_only=True, slots=True)
class GenerationRequest:
    """Asks an engine for one sequence. ``request`` is the assignment number."""

    request: int
    prompt: int
    sibling: int
    prompt_ids: np.ndarray  # int32[p]
    generated: np.ndarray  # int32[k]
    sampling: SamplingParams
    first: int = 0
    """Position of the first token of the response, counted from the beginning of the sample's row."""
    limit: int = 0
    """Position at which the turn of an episode ends; 0: no episode, it ends at ``sampling.max_tokens``."""
    adapter: int = 0
    """Number of an adapter that an ``AdapterEngine`` holds; 0: the weights that were loaded."""
    top_logprobs: int = 0
    """Number of likeliest tokens that are told at each position, by engines with ``tells_top_logprobs``."""

    @property
    def position(self) -> int:
        """Position of the token that comes next."""
        return self.first + len(self.generated)

    @property
    def end(self) -> int:
        """Position at which the sequence ends at the latest."""
        return self.limit or self.sampling.max_tokens


TOP_TOKEN: Final = np.dtype([("token", np.int32), ("logprob", np.float32)])
"""One of the likeliest tokens of a position."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StepOutput:
    """Holds one engine step in columns; ragged as in ``actors.protocol.tokens.TokenReport``."""

    policy_version: int
    requests: np.ndarray  # int64[n]
    offsets: np.ndarray  # int32[n]
    counts: np.ndarray  # int32[n]
    finished: np.ndarray  # uint8[n], FinishReason codes
    tokens: np.ndarray  # int32[sum(counts)]
    logprobs: np.ndarray  # float32[sum(counts)]
    step_s: float
    routes: np.ndarray | None = None
    """uint8[sum(counts), bytes]: experts that predicted each token (``actors/models/routers.py``); None: not told."""
    tops: np.ndarray | None = None
    """TOP_TOKEN[sum(counts), k]: likeliest tokens at each position, likeliest first, of the distribution that was drawn
    from; those that a sequence has asked for are the first ones. None: no sequence asks."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PromptScores:
    """Holds what a model says of the tokens of one prompt, at temperature 1. Entry t is of the token at t, given those
    before it; so the first one is not known: NaN, and no token.
    """

    logprobs: np.ndarray  # float32[p]
    top_ids: np.ndarray  # int32[p, k], likeliest first
    top_logprobs: np.ndarray  # float32[p, k]


WeightTensors = Mapping[str, np.ndarray]
"""HF parameter name → array. bfloat16 travels as uint16 with the dtype in the manifest."""


class RolloutEngine(Protocol):
    """Generates tokens for many sequences at once (continuous batching)."""

    kind: str

    async def start(self, spec: EngineSpec) -> None:
        """Load the model of ``spec`` as version 0 and be ready to step.

        Raises:
            EngineUnavailable: a library or device is missing; says which and how to get it.
            ModelUnreadable: the checkpoint cannot be loaded.
        """
        ...

    @property
    def slots(self) -> int:
        """Sequences that it decodes together, known after ``start``: ``max_running``, or by the engine's own account.

        By its account: those of full length that its memory for keys and values holds; twice as many if it can set
        sequences aside, since on average a running one has half its length. At most ``SLOTS_MAX``.
        """
        ...

    def add(self, requests: Sequence[GenerationRequest]) -> None:
        """Queue requests. One that can never fit ends in its first row with LENGTH and no tokens."""
        ...

    def abort(self, requests: Sequence[int]) -> None:
        """End these with ABORTED in the next step's rows; unknown and ended ones are ignored."""
        ...

    @property
    def has_work(self) -> bool: ...

    async def step(self) -> StepOutput:
        """Advance every running sequence by at least one token. May only be called while ``has_work``."""
        ...

    def hurry(self) -> None:
        """End the step under way after the present token, since something waits for the step's end."""
        ...

    async def load_weights(
        self,
        tensors: WeightTensors,
        dtypes: Mapping[str, str],
        policy_version: int,
        *,
        in_flight: Literal["keep", "recompute"],
    ) -> None:
        """Serve ``policy_version`` from the next step on.

        ``keep``: running sequences keep the older version's KV cache; ``recompute``: their prefix is prefilled anew.

        Raises:
            WeightsMismatch: names, shapes or dtypes are not the model's; nothing was changed.
        """
        ...

    @property
    def policy_version(self) -> int: ...

    async def sleep(self, level: int) -> None:
        """Give memory back: 1 keeps the weights on the host, 2 drops them (a load must follow ``wake``)."""
        ...

    async def wake(self) -> None: ...

    def stats(self) -> EngineStats: ...

    async def close(self) -> None: ...


class SnapshotEngine(RolloutEngine, Protocol):
    """An engine whose versions need not be alike: adapters of any shape, the bare model, other models of its kind.

    Loads are all or nothing, as ``load_weights``, and running sequences are computed anew. An adapter stands beside the
    model that was loaded last: that of the spec, or by ``load_model`` or ``load_weights``.
    """

    tells_top_logprobs: bool
    """Whether it tells the likeliest tokens of each position (``GenerationRequest.top_logprobs``)."""

    @property
    def vocab(self) -> int:
        """Number of token ids, known after ``start``."""
        ...

    async def load_adapter(
        self, tensors: WeightTensors, dtypes: Mapping[str, str], policy_version: int, spec: AdapterSpec | None
    ) -> None:
        """Serve the model with the adapter of ``tensors``; None: without any.

        Raises:
            WeightsMismatch: the tensors are not those of an adapter of ``spec``; nothing was changed.
            ModelUnreadable: the model lacks layers that ``spec`` names; nothing was changed.
        """
        ...

    async def load_model(self, directory: Path, policy_version: int) -> None:
        """Serve the model in ``directory``, which is of the same architecture and sizes. Both are in memory meanwhile.

        Raises:
            WeightsMismatch: it is of another kind; nothing was changed.
            ModelUnreadable: it cannot be loaded; nothing was changed.
        """
        ...

    async def score(self, prompt: np.ndarray, top_k: int) -> PromptScores:
        """Score ``prompt``, int32[p], by the present weights; running sequences are not touched.

        Raises:
            LogitsNotFinite: the weights are broken.
        """
        ...


class AdapterEngine(SnapshotEngine, Protocol):
    """An engine that computes sequences of different adapters, and of the bare model, in one batch.

    An adapter has a number above 0, which never names another one, and stands beside the model that was loaded last.
    While an adapter is loaded by ``load_adapter`` or ``load_weights``, no sequence may be of a numbered one. What a
    sequence gets does not depend on what runs beside it, nor on adapters that come and go meanwhile.
    """

    @property
    def holds_adapters(self) -> bool:
        """Whether it can with this model, known after ``start``."""
        ...

    async def add_adapter(
        self, number: int, tensors: WeightTensors, dtypes: Mapping[str, str], spec: AdapterSpec
    ) -> None:
        """Hold an adapter, which takes as much memory as its tensors.

        Raises:
            WeightsMismatch: the tensors are not those of an adapter of ``spec``.
            ModelUnreadable: the model lacks layers that ``spec`` names.
        """
        ...

    async def drop_adapter(self, number: int) -> None:
        """Forget an adapter, if it is held.

        Raises:
            EngineError: sequences of it run or wait.
        """
        ...

    async def score(self, prompt: np.ndarray, top_k: int, adapter: int = 0) -> PromptScores: ...


def holds_adapters(engine: RolloutEngine) -> TypeGuard[AdapterEngine]:
    """Whether ``engine``, which is started, serves adapters side by side."""
    return bool(getattr(engine, "holds_adapters", False))


def serves_snapshots(engine: RolloutEngine) -> TypeGuard[SnapshotEngine]:
    """Whether ``engine`` is a ``SnapshotEngine``, started or not."""
    return hasattr(engine, "load_adapter")
