"""The engine that stays set up when its worker leaves a job, for the next worker of this process.

    worker of job A ends ─ sleep, without its weights ─▶ kept ─ wake ─▶ worker of job B, if it fits; else close

Invariants
- Only a process that may be given other work keeps anything (``allow``).
- What is kept sleeps at level 2: it has no requests and no weights, and gives its memory back. So nothing of job A is
  served to job B: an engine that wakes from there refuses to step until weights are loaded.
- One whose versions are adapters is not kept: its model would be job A's. Nor is one of several ranks: the others
  end with the job.
- One that does not wake is closed, and the worker starts a new one: the job that it comes to is not to blame.
- It fits if the engine would be built the same: kind, and all of the spec but the seed and the place of the weights.
  The model's shape is that of its ``config.json``.
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Final

import structlog

from actors.rollout.engine import EngineSpec, RolloutEngine

log = structlog.get_logger("headrace.kept_engine")

_WITHOUT_WEIGHTS: Final = 2
"""Level of sleep that drops them."""

_allowed = False
_kept: tuple[RolloutEngine, EngineSpec] | None = None


def allow() -> None:
    """This process may be given other work."""
    global _allowed
    _allowed = True


async def keep_or_close(engine: RolloutEngine, spec: EngineSpec) -> None:
    """The worker that has started ``engine`` with ``spec`` needs it no more."""
    global _kept
    if _allowed and not engine.has_work and spec.adapter is None and spec.tensor_parallel == 1:
        await engine.sleep(_WITHOUT_WEIGHTS)
        _kept = engine, spec
    else:
        await engine.close()


async def take(kind: str, spec: EngineSpec) -> RolloutEngine | None:
    """The kept engine, awake and without weights; None: there is none that fits, and none is kept any more."""
    global _kept
    if _kept is None:
        return None
    (engine, former), _kept = _kept, None
    if engine.kind == kind and _built_alike(former, spec):
        try:
            await engine.wake()
            return engine
        except Exception as error:  # noqa: BLE001 - of whatever library; the former job's model may be gone
            log.warning("the kept engine does not wake; a new one is started", error=repr(error))
    await engine.close()
    return None


def _built_alike(one: EngineSpec, other: EngineSpec) -> bool:
    same = dataclasses.replace(one, model_path=other.model_path, seed=other.seed)
    return same == other and _shape(one.model_path) == _shape(other.model_path)


def _shape(model_path: Path) -> object:
    """The model's configuration without what says nothing of its shape; a path that has none is only like itself."""
    try:
        config = json.loads((model_path / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return str(model_path)
    return {key: value for key, value in config.items() if not key.startswith(("_", "transformers_"))}
