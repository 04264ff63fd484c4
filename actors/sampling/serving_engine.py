"""One life of a sampler's engine, and the snapshot whose weights it has.

base model ─ load_adapter ─▶ base with an adapter ─ load_adapter ─▶ … ─ load_adapter(none) ─▶ base model
    │ ▲
    ▼ │ load_model: what adapters stand beside is always the base
whole model of a snapshot
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable

from actors.rollout.engine import EngineSpec, RolloutEngine, SnapshotEngine, serves_snapshots
from actors.rollout.errors import EngineError, EngineUnavailable
from actors.sampling.snapshots import Snapshot, SnapshotKind, Snapshots
from configs.limits import Limits


class ServingEngine:
    """Holds a started engine. ``present``: its snapshot; ``loading``: one that is being loaded, None if none is."""

    def __init__(self, engine: SnapshotEngine, snapshots: Snapshots, limits: Limits) -> None:
        self.engine = engine
        self._snapshots, self._limits = snapshots, limits
        self.present = snapshots.base
        self.loading: Snapshot | None = None
        self._model = snapshots.base
        """Snapshot of the whole model that the engine has, which an adapter stands beside."""

    async def load(self, snapshot: Snapshot) -> None:
        """Serve ``snapshot`` from the next step on. The engine computes nothing meanwhile.

        Raises:
            SnapshotUnusable, WeightsMismatch, ModelUnreadable: it cannot be served; ``present`` still can.
            EngineUnavailable: the base model cannot be loaded again.
        """
        self.loading = snapshot
        async with asyncio.timeout(self._limits.sampling_load_s):
            if snapshot.kind is SnapshotKind.MODEL:
                await self.engine.load_model(snapshot.path, snapshot.version)
                self._model = snapshot
            else:
                await self._load_beside_base(snapshot)
        self.present = snapshot

    async def _load_beside_base(self, snapshot: Snapshot) -> None:
        base, kind = self._snapshots.base, snapshot.kind
        adapter = await self._snapshots.adapter(snapshot) if kind is SnapshotKind.ADAPTER else None
        if self._model is not base:
            try:
                await self.engine.load_model(base.path, base.version)
            except EngineError as error:
                raise EngineUnavailable(f"the base model cannot be loaded again: {error}") from error
            self._model = self.present = base
        if adapter is None:
            await self.engine.load_adapter({}, {}, base.version, None)
        else:
            await self.engine.load_adapter(adapter.tensors, adapter.dtypes, snapshot.version, adapter.spec)

    async def close(self) -> None:
        """Give the engine up, whatever state it is in."""
        with contextlib.suppress(Exception):
            async with asyncio.timeout(self._limits.close_timeout_s):
                await self.engine.close()


async def start_serving(
    make: Callable[[], RolloutEngine], spec: EngineSpec, snapshots: Snapshots, limits: Limits
) -> ServingEngine:
    """Make an engine and start it with the base model.

    Raises:
        EngineUnavailable: its adapters have one shape, which is fixed at the start; or a library or device is missing.
        ModelUnreadable: the base model cannot be loaded.
    """
    engine = make()
    if not serves_snapshots(engine):
        raise EngineUnavailable(
            f"the {engine.kind} engine serves versions of one shape, and snapshots have any: use torch, or simulated"
        )
    async with asyncio.timeout(limits.sampling_start_s):
        await engine.start(spec)
    return ServingEngine(engine, snapshots, limits)
