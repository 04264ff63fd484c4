"""The kinds of rollout engines. An engine's libraries are imported only when it is created."""

from __future__ import annotations

import importlib
from typing import cast

from actors.host.thread_pool import let_waiting_threads_rest
from actors.ranks.followers import Followers
from actors.rollout.engine import RolloutEngine
from actors.rollout.errors import EngineUnavailable
from configs.limits import DEFAULT_LIMITS, Limits

ENGINES: dict[str, str] = {
    "torch": "actors.rollout.engines.torch.torch_engine:TorchEngine",
    "vllm": "actors.rollout.engines.vllm.engine:VllmEngine",
    "simulated": "actors.rollout.engines.simulated_engine:SimulatedEngine",
    "server": "actors.rollout.engines.server.engine:ServerEngine",
}
LEADERS: dict[str, str] = {
    "vllm": "actors.rollout.engines.vllm.leader:LeadingEngine",
    "simulated": "actors.rollout.engines.simulated_engine:leading_engine",
}
"""Kind that computes over several ranks (``rollout.tensor_parallel``) → import path of its leading engine."""
_HINTS = {"vllm": "run `make vllm`"}


def create_engine(kind: str, followers: Followers | None = None, limits: Limits = DEFAULT_LIMITS) -> RolloutEngine:
    """Make an engine without starting it. ``followers``: further ranks that are to compute with it.

    Raises:
        EngineUnavailable: unknown kind, or its library is not installed, or it computes in one rank only.
    """
    if kind not in ENGINES:
        raise EngineUnavailable(f"rollout.engine is {kind!r}: expected one of {', '.join(ENGINES)}")
    if kind == "torch":
        let_waiting_threads_rest()
    if followers is not None and kind not in LEADERS:
        raise EngineUnavailable(f"rollout.tensor_parallel: the {kind} engine computes in one rank; use vllm")
    module, _, name = (ENGINES if followers is None else LEADERS)[kind].partition(":")
    try:
        made = getattr(importlib.import_module(module), name)
        return cast(RolloutEngine, made() if followers is None else made(followers, limits))
    except ImportError as error:
        raise EngineUnavailable(
            f"the {kind} engine cannot be imported ({error}): {_HINTS.get(kind, 'run `make install`')}"
        ) from error
