"""Fetches announced versions while the engine generates; the newest wins.

    want ─▶ (task) pull ─▶ verified tensors wait in ``ready`` ─▶ the generation task takes them between two steps
              ▲ ├─ fails: retried after a pause (a pull resumes); if the version has retired: ask for the newest
              └─┴─ a newer version was announced meanwhile

Invariants
- One pull at a time, and at most one version waits; a newer one replaces it.
- ``ready`` holds complete, verified versions only, each newer than all before it.
"""

from __future__ import annotations

from collections.abc import Callable

from actors.core.context import Context
from actors.core.patience import Patience
from actors.rollout.relay import relay_beside
from actors.weights.client import PulledWeights, WeightClient
from actors.weights.errors import VersionNotHeld
from transport.address import ActorAddress
from transport.errors import HeadraceError

NEWEST = -1


class VersionPuller:
    """Pulls for one worker. ``on_ready`` is called with a pull's seconds when its version waits in ``ready``."""

    def __init__(
        self,
        ctx: Context,
        job: str,
        on_ready: Callable[[float], None],
        *,
        send_bytes_per_s: int | None = None,
        on_trouble: Callable[[str], None] = lambda _: None,
    ) -> None:
        """``on_trouble``: called with a text for users when pulls have failed for ``limits.stall_report_s``."""
        self._ctx = ctx
        self._client = WeightClient(ctx, job, self._serve)
        self._on_ready = on_ready
        self._send_bytes_per_s = send_bytes_per_s
        self._on_trouble = on_trouble
        self._wanted = NEWEST
        self._weights: ActorAddress | None = None
        self._fetched = NEWEST
        self._pulling = False
        self._ready: PulledWeights | None = None

    def want(self, policy_version: int, weights: ActorAddress | None) -> None:
        """Pull ``policy_version`` from ``weights``, unless a newer one is wanted already."""
        if weights is None or policy_version < self._wanted:
            return
        self._wanted, self._weights = policy_version, weights
        if not self._pulling and self._wanted > self._fetched:
            self._pulling = True
            self._ctx.start_task(self._pull(weights), "pull")

    def take(self) -> PulledWeights | None:
        """The version that waits, if any; the caller closes it."""
        pulled, self._ready = self._ready, None
        return pulled

    def close(self) -> None:
        """Release a version that nobody took, and the versions kept in shared memory for others."""
        if (pulled := self.take()) is not None:
            pulled.close()
        self._client.close()

    async def _serve(self) -> ActorAddress:
        """Serve other pullers the versions that this one pulls over the network."""
        return await relay_beside(self._ctx, self._client.held, self._send_bytes_per_s)

    async def _pull(self, weights: ActorAddress) -> None:
        patience, version = Patience(self._ctx.limits, self._ctx.rng("pull")), self._wanted
        worked_s = self._ctx.now()
        while self._wanted > self._fetched:
            weights = self._weights or weights
            try:
                self._keep(await self._client.pull(weights, version))
                version, worked_s = self._wanted, self._ctx.now()
                patience.begin_anew()
                continue
            except VersionNotHeld as error:
                self._ctx.log.warning(
                    "a version is no longer held; asking for the newest", version=version, error=str(error)
                )
                version = NEWEST
            except HeadraceError as error:
                if error.permanent:
                    raise
                self._ctx.log.warning("a pull failed; trying again", version=version, error=str(error))
                if (for_s := self._ctx.now() - worked_s) > self._ctx.limits.stall_report_s:
                    self._on_trouble(f"weights could not be pulled for {for_s:.0f} s, and are tried again: {error}")
                version = self._wanted
            await patience.again()
        self._pulling = False

    def _keep(self, pulled: PulledWeights) -> None:
        """Hand ``pulled`` over.

        Raises:
            VersionNotHeld: it is not newer than the last one, as happens after a restart of the server.
        """
        if pulled.policy_version <= self._fetched:
            pulled.close()
            raise VersionNotHeld(
                f"the newest version at the server is {pulled.policy_version}, wanted is {self._wanted}"
            )
        if (untaken := self.take()) is not None:
            untaken.close()
        self._fetched, self._ready = pulled.policy_version, pulled
        self._on_ready(pulled.seconds)
