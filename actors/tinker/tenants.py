"""What each tenant may use: when its next training call begins, and whether there is room for what it saves.

    call of n tokens ─▶ take(tenant, model, n): waits in line with those of the tenant's other models ─▶ computed
    save ─▶ room.require(tenant): unnamed snapshots go, those used least recently first ─▶ saved, or refused

Invariants
- Quotas hold for a tenant as a whole, whatever its models, sessions and keys are; no tenant waits for another's.
- A call may be of any size: it begins once what was used before is paid, and what it uses itself is paid after it. So
  the rate holds on average over ``limits.tinker_burst_s`` and the length of one call.
- Time is the loop's. A server that starts begins with nothing used.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Final

from actors.tinker.directories import Directories
from actors.tinker.errors import OperationRefused
from actors.tinker.operation_log import OperationLog
from configs.limits import Limits
from configs.tenants import TenantsConfig

_TOLD: Final = 3
"""Saved weights that a refusal names."""


class Rate:
    """Spreads the tokens of a tenant's training calls over time, as a token bucket does."""

    def __init__(self, per_s: float, burst_s: float) -> None:
        """``burst_s``: seconds of unused rate that are kept."""
        self.per_s, self._burst_s = per_s, burst_s
        self._paid_at_s = float("-inf")
        """When all that was taken is paid for."""
        self._held: dict[str, float] = {}
        """Model → time at which its next call begins."""

    async def take(self, model: str, tokens: int) -> None:
        """Wait until ``tokens`` may be computed for a model."""
        now_s = asyncio.get_running_loop().time()
        begins_s = max(self._paid_at_s, now_s - self._burst_s)
        self._paid_at_s = begins_s + tokens / self.per_s
        if begins_s <= now_s:
            return
        self._held[model] = begins_s
        try:
            await asyncio.sleep(begins_s - now_s)
        except asyncio.CancelledError:
            self._paid_at_s -= tokens / self.per_s  # they are not computed
            raise
        finally:
            del self._held[model]

    def why_held(self, model: str) -> str:
        """What a model's next call waits for, in a sentence; empty: for nothing here."""
        if model not in self._held:
            return ""
        left_s = self._held[model] - asyncio.get_running_loop().time()
        return (
            f"your quota is {self.per_s:g} training tokens/s, and more were used: this model goes on in {left_s:.0f} s"
        )


@dataclass(frozen=True)
class Quotas:
    """Holds what one tenant may use, with the server's limits where the tenants file says nothing."""

    models: int
    requests: int
    saved_bytes: int | None
    rate: Rate | None
    """None: any number of tokens may be trained on."""


class Tenants:
    """Knows the quotas of tenants, and what they have used of their rates."""

    def __init__(self, config: TenantsConfig, limits: Limits) -> None:
        self._config, self._limits = config, limits
        self._known: dict[str, Quotas] = {}

    def of(self, tenant: str) -> Quotas:
        found = self._known.get(tenant)
        if found is None:
            said, limits = self._config.of(tenant), self._limits
            per_s = said.training_tokens_per_s
            found = self._known[tenant] = Quotas(
                models=said.models or limits.tinker_models,
                requests=said.requests or limits.tinker_tenant_requests,
                saved_bytes=said.saved_bytes,
                rate=None if per_s is None else Rate(per_s, limits.tinker_burst_s),
            )
        return found

    async def take(self, tenant: str, model: str, tokens: int) -> None:
        """Wait until the tenant's quota lets ``tokens`` be computed for a model."""
        if tokens and (rate := self.of(tenant).rate) is not None:
            await rate.take(model, tokens)

    def why_held(self, tenant: str, model: str) -> str:
        """Why a model's operations wait for the tenant's quota, in a sentence; empty: they do not."""
        rate = self.of(tenant).rate
        return "" if rate is None else rate.why_held(model)


class Room:
    """Decides whether a tenant's quota of bytes has room for one more thing that is saved."""

    def __init__(
        self, tenants: Tenants, log: OperationLog, directories: Directories, unneeded: Callable[[str], str | None],
        end: Callable[[str], Awaitable[None]],
    ) -> None:  # fmt: skip
        """``unneeded``: says which unnamed snapshot of a tenant is needed least; ``end``: ends one."""
        self._tenants, self._log, self._directories = tenants, log, directories
        self._unneeded, self._end = unneeded, end

    async def require(self, tenant: str) -> None:
        """Raises OperationRefused: the tenant has as much on the disk as it may, or more."""
        most = self._tenants.of(tenant).saved_bytes
        if most is None:
            return
        while (used := await self._used(tenant)) >= most:
            snapshot = self._unneeded(tenant)
            if snapshot is None:
                largest = await self._largest(tenant)
                delete = f"delete saved weights (the largest are {largest})" if largest else "end a session"
                raise OperationRefused(
                    f"{used} bytes of yours are on the disk, and your quota is {most}: {delete}, or save with "
                    "ttl_seconds; states and snapshots of a session go when it ends"
                )
            await self._end(snapshot)

    async def _used(self, tenant: str) -> int:
        named = await self._log.directories()
        return self._directories.size(name for name, owner in named.items() if owner == tenant)

    async def _largest(self, tenant: str) -> str:
        rows = sorted(await self._log.weights_of(tenant), key=lambda row: -self._directories.size([row.directory]))
        return ", ".join(f"tinker://{row.model}/{row.kind}/{row.name}" for row in rows[:_TOLD])
