"""Finds the shares of versions that lie on several machines, and asks them, on behalf of the weight server.

publish   hold ─ Publish to each ─▶ all have it sealed: only then is the version announced
pull      addresses ─▶ where each source is now; None while it is gone
Down      lost ─▶ looked for, until its next life has registered
"""

from __future__ import annotations

from collections.abc import Iterable

from actors.core.context import Context
from actors.core.errors import AskError, RemoteError
from actors.core.leader import Leader
from actors.core.patience import Patience
from actors.core.watch import Down
from actors.protocol.services import LookupService, ServiceFound
from actors.protocol.weights import Manifest, Publish, Published, QueryVersions, Versions
from actors.weights.errors import SourceLost
from transport.address import ActorAddress


class ShareHolders:
    """Knows where the shares of one job are."""

    def __init__(self, ctx: Context, job: str, scheduler: Leader) -> None:
        self._ctx, self._job, self._scheduler = ctx, job, scheduler
        self._known: dict[str, ActorAddress] = {}
        self._looking: set[str] = set()

    def addresses(self, manifest: Manifest) -> tuple[ActorAddress | None, ...]:
        """Address of each of the version's sources; None: it is gone, and looked for."""
        for name in manifest.sources:
            if name and name not in self._known:
                self._look_for(name)
        return tuple(self._known.get(name) if name else self._ctx.self_address for name in manifest.sources)

    async def hold(self, message: Publish) -> None:
        """Have all shares hold the version.

        Raises:
            AskError, SourceLost: one of them is not there, or its share is not.
        """
        for name in filter(None, message.manifest.sources):
            patience = Patience(self._ctx.limits, self._ctx.rng("shares"), self._ctx.limits.publish_timeout_s)
            while True:
                try:
                    await self._ctx.ref(await self._find(name)).ask(message, Published)
                    break
                except (AskError, SourceLost) as error:
                    if isinstance(error, RemoteError) or not await patience.again():
                        raise

    async def whole(self, manifests: Iterable[Manifest], suspect: int = -1) -> set[int]:
        """Those of the versions of which all shares are there. ``suspect``: see ``QueryVersions``."""
        found: dict[str, tuple[int, ...]] = {}
        whole: set[int] = set()
        for manifest in manifests:
            for name in manifest.sources:
                if name and name not in found:
                    found[name] = await self._held_by(name, suspect)
            if all(not name or manifest.policy_version in found[name] for name in manifest.sources):
                whole.add(manifest.policy_version)
        return whole

    async def _held_by(self, name: str, suspect: int) -> tuple[int, ...]:
        question = QueryVersions(job=self._job, suspect=suspect)
        limit_s = None if suspect < 0 else self._ctx.limits.publish_timeout_s  # for a suspect all of it is hashed
        try:
            return (await self._ctx.ref(await self._find(name)).ask(question, Versions, limit_s)).held
        except (AskError, SourceLost) as error:
            self._ctx.log.warning("a share does not answer: its versions cannot be pulled", share=name, why=str(error))
            return ()

    def lost(self, message: Down) -> None:
        """Note that a share is gone, if ``message`` is of one."""
        for name, address in list(self._known.items()):
            if (address.name, address.peer) == (message.address.name, message.address.peer):
                del self._known[name]
                self._look_for(name)

    def _look_for(self, name: str) -> None:
        if name not in self._looking:
            self._looking.add(name)
            self._ctx.start_task(self._look(name), f"look for the share of {name}")

    async def _look(self, name: str) -> None:
        patience = Patience(self._ctx.limits, self._ctx.rng("shares"))
        try:
            while name not in self._known:
                try:
                    await self._find(name)
                except (AskError, SourceLost):
                    await patience.again()
        finally:
            self._looking.discard(name)

    async def _find(self, name: str) -> ActorAddress:
        """The address of the share ``name``, as the scheduler knows it now.

        Raises:
            AskError: the scheduler does not answer.
            SourceLost: there is no such share now.
        """
        scheduler = self._ctx.ref(self._scheduler.address)
        share = (await scheduler.ask(LookupService(job=self._job, role=name), ServiceFound)).address
        if share is None:
            raise SourceLost(f"{name}, which has a share of the weights, is gone; tried again until it is back")
        if self._known.get(name) != share:
            self._known[name] = share
            self._ctx.watch(share)
        return share
