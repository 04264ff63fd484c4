"""Samples of one base model by several processes: whose sampler gets which request.

    sample ─▶ the least busy sampler; among equals the one that this snapshot belongs to ─▶ AskSample ─▶ Sampled
                                 └── it is gone, or was started again ─▶ found anew, or another one is asked

Invariants
- A request names its seed, so whoever is asked gives the same tokens: an interrupted one is asked again elsewhere.
- Requests for one snapshot go to one sampler until that has ``_STEP_SEQUENCES`` more to do than another: an engine may
  have the weights of one snapshot at a time, and changing them takes longer than a short queue.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Final

import xxhash

from actors.core.context import Context
from actors.core.errors import AskError, RemoteError
from actors.core.message import Message
from actors.protocol.sampling import AskSample, Sampled, SampleRequest, SampleResult
from actors.sampling.errors import BadSampleRequest, EngineLost, SnapshotUnusable
from actors.serving.places import Places

_STEP_SEQUENCES: Final = 64


class SamplerFleet:
    """Asks the samplers called ``names``."""

    def __init__(self, ctx: Context, places: Places, names: Sequence[str], limit_s: float) -> None:
        """``limit_s``: time within which a request is answered, its wait for a turn included."""
        self._ctx, self._places, self._names, self._limit_s = ctx, places, list(names), limit_s
        self._running = Counter[str]()
        """Sequences that a sampler has been asked for."""

    async def sample(self, request: SampleRequest) -> SampleResult:
        """Have ``request`` answered by one of the samplers.

        Raises:
            BadSampleRequest, SnapshotUnusable: as ``SnapshotSampler.sample``.
            EngineLost: the sampler failed, or was lost; asking again is safe.
        """
        name = self._chosen(request.snapshot or "")
        self._running[name] += request.samples
        try:
            return await self._asked(name, AskSample(request=request))
        finally:
            self._running[name] -= request.samples

    def _chosen(self, snapshot: str) -> str:
        return min(
            self._names,
            key=lambda name: (
                self._running[name] // _STEP_SEQUENCES,
                xxhash.xxh3_64_intdigest(f"{snapshot} {name}".encode()),
            ),
        )

    async def _asked(self, name: str, question: Message) -> SampleResult:
        address = await self._places.find(name)
        try:
            return (await self._ctx.ref(address).ask(question, Sampled, self._limit_s)).result
        except AskError as error:
            raised = error.raised if isinstance(error, RemoteError) else None
            if isinstance(raised, BadSampleRequest | SnapshotUnusable | EngineLost):
                raise raised from error
            self._places.forget(name, address)
            raise EngineLost(f"{name} has not answered: {error}") from error
