"""Keeps an engine set up when its worker leaves a job, for the next worker of this process.

    worker of job A ends ─ sleep, without its weights ─▶ kept ─ wake ─▶ worker of job B, if it fits; else close

Invariants
- Only a process that may be given other work keeps an engine (``allow``).
- A kept engine sleeps at level 2: it has no requests and no weights, and has freed its memory. So nothing of job A is
  served to job B: an engine that wakes from level 2 refuses to step until weights are loaded.
- An engine whose versions are adapters is not kept, since its model is job A's; nor is one of several ranks, since the
  other ranks end with the job.
- An engine that does not wake is closed, and the worker starts a new one: job B is not to blame.
- A kept engine fits if a new one would be built the same: it is of the same kind, and its spec differs at most in the
  seed and the path of a model with an equal ``config.json``.
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
"""Level of sleep that drops the weights."""

_allowed = False
_kept: tuple[RolloutEngine, EngineSpec] | None = None


def allow() -> None:
    """Allow engines to be kept, since this process may be given other work."""
    global _allowed
    _allowed = True


async def keep_or_close(engine: RolloutEngine, spec: EngineSpec) -> None:
    """Keep ``engine``, which was started with ``spec`` and is not needed by its worker any more, or close it."""
    global _kept
    if _allowed and not engine.has_work and spec.adapter is None and spec.tensor_parallel == 1:
        await engine.sleep(_WITHOUT_WEIGHTS)
        _kept = engine, spec
    else:
        await engine.close()


async def take(kind: str, spec: EngineSpec) -> RolloutEngine | None:
    """The kept engine, awake and without weights; None if none fits. Afterwards no engine is kept."""
    global _kept
    if _kept is None:
        return None
    (engine, former), _kept = _kept, None
    if engine.kind == kind and _built_alike(former, spec):
        try:
            await engine.wake()
            return engine
        except Exception as error:  # noqa: BLE001 - of any library; the former job's model may be gone
            log.warning("the kept engine does not wake; a new one is started", error=repr(error))
    await engine.close()
    return None


def _built_alike(one: EngineSpec, other: EngineSpec) -> bool:
    same = dataclasses.replace(one, model_path=other.model_path, seed=other.seed)
    return same == other and _shape(one.model_path) == _shape(other.model_path)


def _shape(model_path: Path) -> object:
    """The part of the model's configuration that tells its shape; a directory without one fits only itself."""
    try:
        config = json.loads((model_path / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return str(model_path)
    return {key: value for key, value in config.items() if not key.startswith(("_", "transformers_"))}
