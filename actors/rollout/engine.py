"""The rollout engine: what a worker drives. Kinds in ``engines/``: torch, vllm, simulated.

Invariants (asserted for every kind by ``tests/contracts/test_rollout_engine_contract.py``)
- The caller awaits one method at a time; between two ``step`` calls nothing moves, so a weight load, an abort
  and a new request all take effect between engine steps.
- Every request that is added ends in exactly one row with a finish reason other than RUNNING; after that no row.
- ``logprobs`` are of the distribution that the token was drawn from (after temperature, top-k and top-p).
- A request with ``generated`` tokens goes on behind them; its first row has ``offset == first + len(generated)``.
- The noise of a token belongs to (seed, prompt, sibling, position). What an episode's environment wrote ends no turn,
  though it may be a stop token.
- ``load_weights`` is all or nothing: on any error the engine still serves the version that it served before.
- Rows carry the version that computed them; the prefix cache never crosses versions.
- ``stats`` count what prefill has computed and what it has been spared, together the tokens of every sequence that has
  begun, or begun again: for a load with ``recompute``, or after a sleep.
- Blocking work runs off the event loop.

    start → [ add* · abort* · load_weights* · step ]* → close
                sleep(level) ⇄ wake between any two
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol

import numpy as np

from actors.host.adapter import AdapterSpec
from actors.protocol.work import EngineStats, SamplingParams
from configs.limits import DEFAULT_LIMITS


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineSpec:
    """Tells an engine what it needs to start. ``model_path`` is an HF directory (config, tokenizer, safetensors)."""

    model_path: Path
    dtype: str = "float32"
    device: str = "cpu"
    max_running: int = 64
    """Sequences decoded together."""
    max_context_tokens: int = 1024
    """Prompt plus response."""
    threads: int = 1
    seed: int = 0
    prefix_cache_bytes: int = DEFAULT_LIMITS.prefix_cache_bytes
    """Memory for beginnings of prompts, of engines that do not measure their own."""
    tensor_parallel: int = 1
    """Ranks that compute one step together, each with a part of every layer."""
    adapter: AdapterSpec | None = None
    """Set: a version is such an adapter of the model in ``model_path``, which stays loaded as it is."""
    options: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """Passed through to the engine kind; each documents its own."""


@dataclass(frozen=True, kw_only=True, slots=True)
class GenerationRequest:
    """Asks for one sequence. ``request`` is the assignment number."""

    request: int
    prompt: int
    sibling: int
    prompt_ids: np.ndarray  # int32[p]
    generated: np.ndarray  # int32[k]
    sampling: SamplingParams
    first: int = 0
    """Position of the token behind the prompt, where positions are counted from the beginning of the sample's row."""
    limit: int = 0
    """Position at which a turn of an episode ends; 0: it is no turn, and ends at ``sampling.max_tokens``."""

    @property
    def position(self) -> int:
        """Position of the token that comes next."""
        return self.first + len(self.generated)

    @property
    def end(self) -> int:
        """Position at which it ends at the latest."""
        return self.limit or self.sampling.max_tokens


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
        """Something waits for the step that is under way: it is to end with the token that is being made."""
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
