"""Which engines there are. An engine's libraries are imported only when it is created."""

from __future__ import annotations

import importlib
from typing import cast

from actors.host.thread_pool import let_waiting_threads_rest
from actors.rollout.engine import RolloutEngine
from actors.rollout.errors import EngineUnavailable

ENGINES: dict[str, str] = {
    "torch": "actors.rollout.engines.torch.torch_engine:TorchEngine",
    "vllm": "actors.rollout.engines.vllm.engine:VllmEngine",
    "simulated": "actors.rollout.engines.simulated_engine:SimulatedEngine",
}
_HINTS = {"torch": "run `make install`", "vllm": "run `make vllm`", "simulated": "run `make install`"}


def create_engine(kind: str) -> RolloutEngine:
    """A new engine that has not been started.

    Raises:
        EngineUnavailable: unknown kind, or its library is not installed.
    """
    if kind not in ENGINES:
        raise EngineUnavailable(f"rollout.engine is {kind!r}: expected one of {', '.join(ENGINES)}")
    if kind == "torch":
        let_waiting_threads_rest()
    module, _, name = ENGINES[kind].partition(":")
    try:
        return cast(RolloutEngine, getattr(importlib.import_module(module), name)())
    except ImportError as error:
        raise EngineUnavailable(f"the {kind} engine cannot be imported ({error}): {_HINTS[kind]}") from error
