"""Ensures that one head owns the pods of a run, by a Lease object of the cluster that one process holds at a time.

    no lease, or its holder is silent for cluster_claim_s ─▶ ours ─▶ renewed ─▶ … ─▶ removed at the end
    the lease changes while we watch it ─▶ refused: another head is alive

Invariants
- Clocks are not compared: a holder is alive if the lease changes while we watch it.
- An API server that is away ends no claim, since no other head could reach the server either to take it.
"""

from __future__ import annotations

import asyncio
import datetime as dt
import socket
from collections.abc import Callable
from typing import Any, Final

from actors.host.clock import time_of_day_s
from configs.limits import Limits
from supervisors.providers.kubernetes.api import CONFLICT, NOT_FOUND, ApiAway, ApiRefused, ClusterApi
from supervisors.providers.kubernetes.pods import Owner
from supervisors.tree.errors import ProviderError

LOOKS: Final = 10
"""Number of times that another holder's lease must be seen unchanged before it is taken over."""
RENEWALS: Final = 3
"""Number of renewals within ``cluster_claim_s``, after which a silent holder loses the lease."""


class Claim:
    """A claim lets one process start the run's machines, from ``take`` on and for as long as ``keep`` runs."""

    def __init__(self, api: ClusterApi, owner: Owner, limits: Limits) -> None:
        self._api, self._limits, self._owner = api, limits, owner
        self._holder = f"{socket.gethostname()}_{owner.life}"
        self._name = owner.mark
        self._lease: dict[str, Any] | None = None

    async def take(self) -> None:
        """Own the run's pods from now on.

        Raises:
            ProviderError: another head owns them.
            ApiRefused: the cluster does not let us read or write leases.
            ApiAway: the cluster does not answer.
        """
        seen, silent = "", 0
        while True:
            lease = await self._read()
            if lease is None:
                if await self._write(None):
                    return
                continue
            version = str(lease["metadata"]["resourceVersion"])
            if seen and version != seen:
                holder = lease["spec"].get("holderIdentity", "an unnamed process")
                raise ProviderError(
                    f"another head owns the machines of this run: it holds the lease {self._name} in namespace "
                    f"{self._api.namespace} as {holder}, and has just renewed it; end it, or start this one with a run "
                    "directory of its own"
                )
            seen, silent = version, silent + 1
            if silent > LOOKS and await self._write(lease):
                return
            await asyncio.sleep(self._limits.cluster_claim_s / LOOKS)

    async def keep(self, lost: Callable[[str], None]) -> None:
        """Renew the lease until cancelled. ``lost`` is called once, if another head has taken the lease."""
        while True:
            await asyncio.sleep(self._limits.cluster_claim_s / RENEWALS)
            try:
                if await self._write(self._lease):
                    continue
                lease = await self._read()
            except (ApiAway, ApiRefused):
                continue  # missing rights are reported when a machine is to be started
            if lease is None or lease["spec"].get("holderIdentity") == self._holder:
                self._lease = lease  # it was removed or edited from outside: write it again
                continue
            self._lease = None  # it is not ours to release
            lost(
                f"{lease['spec'].get('holderIdentity')} has taken the lease {self._name} in namespace "
                f"{self._api.namespace}: another head owns the machines of this run now"
            )
            return

    async def release(self) -> None:
        """Remove the lease, so that the next head need not wait; but not if another head has taken it unnoticed."""
        if self._lease is not None:
            self._lease = None
            lease = await self._read()
            if lease is not None and lease["spec"].get("holderIdentity") == self._holder:
                await self._api.delete_lease(self._name)

    async def _read(self) -> dict[str, Any] | None:
        try:
            return await self._api.get_lease(self._name)
        except ApiRefused as error:
            if error.code == NOT_FOUND:
                return None
            raise

    async def _write(self, before: dict[str, Any] | None) -> bool:
        """Write our name and the time into the lease; False if another process was faster."""
        now = dt.datetime.fromtimestamp(time_of_day_s(), dt.UTC)
        spec = {
            "holderIdentity": self._holder,
            "leaseDurationSeconds": max(1, round(self._limits.cluster_claim_s)),
            "renewTime": now.strftime("%Y-%m-%dT%H:%M:%S.%fZ"),
        }
        try:
            if before is None:
                self._lease = await self._api.create_lease({"metadata": self._owner.metadata(self._name), "spec": spec})
            else:
                self._lease = await self._api.replace_lease({"metadata": before["metadata"], "spec": spec})
        except ApiRefused as error:
            if error.code in (CONFLICT, NOT_FOUND):
                return False
            raise
        return True
