"""One life of a sampler's engine, and the snapshots that it can compute now.

    an engine that holds adapters       base model, and adapters beside it: one turn, ``hold`` for each of them
                                            │ ▲
    any other                           base model ─ load_adapter ─▶ base with an adapter ─▶ … : a turn each
                                            │ ▲
                                            ▼ │ load_model: what adapters stand beside is always the base
    both                                whole model of a snapshot: a turn each

Adapters are held as long as they fit into ``limits.sampling_memory_bytes``; then those that were used least recently,
and that nothing computes with, are dropped.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import OrderedDict
from collections.abc import Callable, Collection

import numpy as np

from actors.rollout.engine import (
    EngineSpec,
    PromptScores,
    RolloutEngine,
    SnapshotEngine,
    holds_adapters,
    serves_snapshots,
)
from actors.rollout.errors import EngineError, EngineUnavailable
from actors.sampling.snapshots import Snapshot, SnapshotKind, Snapshots
from configs.limits import Limits


class ServingEngine:
    """Holds a started engine. ``present``: snapshot of the turn; ``loading``: one that is being loaded, or None."""

    def __init__(self, engine: SnapshotEngine, snapshots: Snapshots, limits: Limits) -> None:
        self.engine = engine
        self._snapshots, self._limits = snapshots, limits
        self.present = snapshots.base
        self.loading: Snapshot | None = None
        self._model = snapshots.base
        """Snapshot of the whole model that the engine has, which an adapter stands beside."""
        self._held: OrderedDict[int, int] = OrderedDict()
        """Bytes of the adapters that the engine holds, by version; the one that was used least recently is first."""

    def turn_of(self, snapshot: Snapshot) -> Snapshot:
        """The snapshot in whose turn ``snapshot`` is computed."""
        beside = snapshot.kind is SnapshotKind.ADAPTER and holds_adapters(self.engine)
        return self._snapshots.base if beside else snapshot

    def adapter_of(self, snapshot: Snapshot) -> int:
        """The number by which the engine knows ``snapshot`` beside others; 0: it is what the turn has loaded."""
        return 0 if self.turn_of(snapshot) is snapshot else snapshot.version

    async def hold(self, snapshot: Snapshot, busy: Collection[int]) -> bool:
        """Have the engine hold ``snapshot`` in its turn; whether there was room beside the ``busy`` ones (versions).

        Raises:
            SnapshotUnusable, WeightsMismatch, ModelUnreadable: it cannot be served.
        """
        engine, number = self.engine, self.adapter_of(snapshot)
        if not number or number in self._held:
            if number:
                self._held.move_to_end(number)
            return True
        assert holds_adapters(engine)
        self.loading = snapshot
        async with asyncio.timeout(self._limits.sampling_load_s):
            adapter = await self._snapshots.adapter(snapshot)
            idle = [version for version in self._held if version not in busy]
            while self._held and sum(self._held.values()) + adapter.size_bytes > self._limits.sampling_memory_bytes:
                if not idle:
                    self.loading = None
                    return False
                await engine.drop_adapter(idle[0])
                del self._held[idle.pop(0)]
            await engine.add_adapter(number, adapter.tensors, adapter.dtypes, adapter.spec)
        self._held[number], self.loading = adapter.size_bytes, None
        return True

    async def score(self, prompt: np.ndarray, top_k: int, snapshot: Snapshot) -> PromptScores:
        """Score a prompt by a snapshot that is held. Raises LogitsNotFinite."""
        number = self.adapter_of(snapshot)
        if number and holds_adapters(self.engine):
            return await self.engine.score(prompt, top_k, number)
        return await self.engine.score(prompt, top_k)

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
