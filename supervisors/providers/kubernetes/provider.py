"""The provider ``kubernetes``: each machine is a pod that runs one ``headrace node``.

    open ─▶ claim ─▶ pods of former lives removed ─▶ list, watch, list …
    start ─▶ create ─▶ Pending ─(start_s)─▶ Running ─▶ the node joins
    notice ─▶ delete with a grace period ─▶ SIGTERM ─▶ the node leaves ─▶ SIGKILL    kill ─▶ delete without one
    the cluster takes a pod back ─▶ SIGTERM, its grace period is the notice ─▶ reported as ``taken``

Invariants
- A machine has ended only if the API server shows it: its pod has ended, or is not in the list any more. If the server
  does not answer, nothing is concluded, and requests are repeated.
- A watch lasts ``limits.cluster_list_s`` at most; then all pods are listed, so nothing is missed for longer than that.
- The pod of every machine that has ended, cannot start or is late is deleted.
- Only pods of this run are touched: those of former lives only once, when the claim has just been taken; afterwards
  those of this life alone, since a head that was stopped for long may not know that another one holds the claim now.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import secrets
from dataclasses import dataclass, field
from typing import Final

from actors.core.context import named_rng
from actors.core.patience import Patience
from configs.kubernetes_schema import KubernetesConfig
from configs.limits import Limits
from configs.schema import JobConfig
from supervisors.providers.base import BookedProvider, end_of_log, log
from supervisors.providers.kubernetes.api import CONFLICT, GONE, NOT_FOUND, ApiAway, ApiRefused, ClusterApi, Pod
from supervisors.providers.kubernetes.claim import Claim
from supervisors.providers.kubernetes.pods import DELETED, RUN, Order, Owner, manifest, read
from supervisors.tree.errors import ProviderError

_POD_NAME: Final = "HEADRACE_POD_NAME"
_POD_UID: Final = "HEADRACE_POD_UID"
"""Variables in the head's own pod, set by the manifest in ``deploy/``: machines' pods are removed with that pod."""
_CLUSTER: Final = "the cluster"
"""Name under which news are reported that are not about one machine."""


@dataclass
class _Machine:
    pod: str
    made: bool = False
    """Whether the API server is known to have the pod."""
    asked_before: bool = False
    """Whether the pod was requested and no answer came, so that it may exist."""
    grace_s: int | None = None
    """Grace period with which the pod is to be deleted; None: it is to stay."""
    words: str = ""
    late: asyncio.TimerHandle | None = None
    """Timer that gives up a pod that does not run in time."""
    overdue: asyncio.TimerHandle | None = None
    """Timer that gives up a pod that the cluster takes away and that does not end."""
    work: asyncio.Task[None] | None = field(default=None, repr=False)
    """Task with the current request about this pod."""


class KubernetesProvider(BookedProvider):
    """The provider's machines are pods. Create it on the running loop, and ``open`` it.

    Args:
        join: the head's endpoint, as pods reach it.
        notice_s: grace period of the pods, and the notice that their nodes know of.
    """

    def __init__(
        self,
        config: KubernetesConfig,
        api: ClusterApi,
        owner: Owner,
        *,
        join: str,
        slots: int,
        notice_s: float,
        limits: Limits,
    ) -> None:
        super().__init__()
        self._config, self._api, self._owner, self._limits = config, api, owner, limits
        self._join, self._slots, self._notice_s = join, slots, notice_s
        self._close_window_s = limits.stop_timeout_s
        self._claim = Claim(api, owner, limits)
        self._machines: dict[str, _Machine] = {}
        self._node_of: dict[str, str] = {}
        self._number = 0
        self._lives: list[asyncio.Task[None]] = []
        """Tasks that run from ``open`` to ``close``."""
        self._cleaning: dict[str, asyncio.Task[None]] = {}
        """Pod → its deletion, for pods whose machine's end has been reported, and for pods of no machine."""
        self._refused = "the provider has not been opened"
        """Why no machine can be started; empty if one can."""
        self._is_away = False

    @classmethod
    def of(cls, job: JobConfig, join: str, mark: str) -> KubernetesProvider:
        """The provider that ``job`` asks for.

        Raises:
            ProviderError: lightkube is not installed, or no cluster is configured.
        """
        config, limits = job.provider.kubernetes, job.limits
        assert config is not None, "the checks of the job file ask for it"
        try:
            from supervisors.providers.kubernetes.lightkube_api import LightkubeApi
        except ImportError as error:
            raise ProviderError(
                f"provider.kind is kubernetes, which needs lightkube: pip install 'headrace[kubernetes]' ({error})"
            ) from error
        pod = os.environ.get(_POD_NAME, ""), os.environ.get(_POD_UID, "")
        owner = Owner(job.name, mark, secrets.token_hex(2), pod if all(pod) else None)
        api, provider = LightkubeApi.of(config, limits), job.provider
        return cls(config, api, owner, join=join, slots=provider.slots, notice_s=provider.notice_s, limits=limits)

    async def open(self) -> None:
        """Claim this run's pods, and remove those that a former life of the head has left.

        Raises:
            ProviderError: another head owns them, or the cluster refuses or does not answer.
        """
        namespace, held = self._api.namespace, False
        try:
            await self._claim.take()
            await self._list()
            held = True
        except ApiRefused as error:
            raise ProviderError(f"the cluster refuses to look after pods in namespace {namespace}: {error}") from error
        except ApiAway as error:
            raise ProviderError(f"the cluster's API server does not answer: {error}") from error
        finally:
            if not held:
                await self._let_go()
        self._refused = ""
        self._lives = [
            asyncio.create_task(self._follow(), name="watch of the pods"),
            asyncio.create_task(self._claim.keep(self._lost), name="claim of the pods"),
        ]

    def notice(self, node: str, window_s: float) -> None:
        if (machine := self._machines.get(node)) is not None and machine.grace_s != 0:
            machine.grace_s = max(1, math.ceil(window_s))  # rounded up: the base class's timer ends it on time
        super().notice(node, window_s)

    async def close(self) -> None:
        await super().close()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._close_window_s):
                while self._cleaning:
                    await asyncio.shield(next(iter(self._cleaning.values())))
        if self._machines or self._cleaning:
            where = f"kubectl delete pods -n {self._api.namespace} -l {RUN}={self._owner.mark}"
            self.on_news(_CLUSTER, f"pods may be left, since it does not answer; remove them with {where}")
        for task in [*self._lives, *self._cleaning.values(), *(machine.work for machine in self._machines.values())]:
            if task is not None:
                task.cancel()
        if self._lives:
            self._lives = []
            await self._let_go()

    async def _let_go(self) -> None:
        with contextlib.suppress(ApiAway, ApiRefused):
            await self._claim.release()
        await self._api.close()

    # ------------------------------------------------------------ what BookedProvider asks for

    def _begin(self, node: str, kind: str) -> None:
        if self._refused:
            raise ProviderError(f"{node} cannot be started: {self._refused}")
        self._number += 1
        machine = _Machine(self._owner.pod_name(self._number))
        order = Order(node, kind, self._join, self._slots, self._notice_s)
        pod = manifest(self._config, self._owner, order, machine.pod)
        self._machines[node], self._node_of[machine.pod] = machine, node
        machine.late = asyncio.get_running_loop().call_later(self._config.start_s, self._is_late, node)
        machine.work = asyncio.create_task(self._make(node, machine, pod), name=f"create {machine.pod}")

    def _tell_to_go(self, node: str) -> None:
        self._remove_soon(node)

    def _take_away(self, node: str) -> None:
        if (machine := self._machines.get(node)) is not None:
            machine.grace_s = 0
            self._remove_soon(node)

    def _drop(self, node: str) -> None:
        machine = self._machines[node]
        machine.work = asyncio.create_task(self._read_and_end(node, machine), name=f"log of {machine.pod}")

    # ------------------------------------------------------------ requests

    async def _read_and_end(self, node: str, machine: _Machine) -> None:
        """Report a machine's end with the last lines of its log, which goes away with the pod."""
        name = f"the log of its pod {machine.pod}"
        try:
            lines = await self._api.log(machine.pod, self._limits.machine_log_lines)
            words = end_of_log(name, lines, self._limits)
        except ProviderError as error:
            next_one = f"kubectl logs -f -n {self._api.namespace} -l {RUN}={self._owner.mark}"
            words = f"; {name} cannot be read: {error}; look at the next one's: {next_one}"
        if self._machines.get(node) is machine:
            machine.work = None
            self._give_up(node, words.removeprefix("; "))

    async def _make(self, node: str, machine: _Machine, pod: Pod) -> None:
        patience = self._patience(node)
        while machine.grace_s is None and node in self._machines:
            try:
                await self._api.create(pod)
            except ApiAway as error:
                machine.asked_before, machine.words = True, str(error)
            except ApiRefused as error:
                if error.reason != "Conflict":  # "Conflict": a shared quota changed meanwhile: try again
                    if error.code != CONFLICT or not machine.asked_before:
                        self._gone(node, str(error))
                        return
                    break  # the answer to an earlier request was lost
            except Exception as error:  # noqa: BLE001 (else the machine's end would never be reported)
                log.exception("a pod cannot be asked for")
                self._gone(node, f"its pod cannot be asked for: {error!r}")
                return
            else:
                machine.words = ""
                break
            await patience.again()
        machine.made = machine.grace_s is None
        machine.work = None
        if machine.grace_s is not None:
            self._remove_soon(node)

    def _remove_soon(self, node: str) -> None:
        """Delete a machine's pod, once it is known whether it exists; a second call replaces the first."""
        machine = self._machines[node]
        if machine.work is not None:
            if machine.work.get_name().startswith("create"):
                return  # that task removes it at its end
            machine.work.cancel()
        machine.work = asyncio.create_task(self._remove(node, machine), name=f"delete {machine.pod}")

    async def _remove(self, node: str, machine: _Machine) -> None:
        assert machine.grace_s is not None, "told to go"
        if not await self._delete(machine.pod, machine.grace_s) and node in self._machines:
            self._gone(node, machine.words)

    async def _delete(self, pod: str, grace_s: int) -> bool:
        """Repeat the deletion until it is accepted; False if the pod was not there. Missing rights may come back."""
        patience, refused = self._patience(pod), False
        while True:
            try:
                await self._api.delete(pod, grace_s)
                return True
            except ApiAway:
                pass
            except ApiRefused as error:
                if error.code == NOT_FOUND:
                    return False
                if not refused:
                    refused = True
                    self.on_news(_CLUSTER, f"the pod {pod} cannot be deleted: {error}")
            await patience.again()

    def _clean(self, pod: str) -> None:
        """Delete a pod whose machine's end has been reported, or that belongs to no machine."""

        async def clean() -> None:
            try:
                await self._delete(pod, 0)
            finally:
                del self._cleaning[pod]

        if pod not in self._cleaning:
            log.info("a pod is removed", pod=pod)
            self._cleaning[pod] = asyncio.create_task(clean(), name=f"delete {pod}")

    def _patience(self, name: str) -> Patience:
        return Patience(self._limits, named_rng(0, "kubernetes", name))

    # ------------------------------------------------------------ what the cluster shows

    async def _follow(self) -> None:
        """List and watch in turn, with growing pauses until a watch lasts, to spare a server that breaks them."""
        patience = self._patience("watch")
        while True:
            listed = False
            try:
                version = await self._list()
                listed = True
                async with asyncio.timeout(self._limits.cluster_list_s):
                    await self._watch(version)
            except TimeoutError:
                patience.begin_anew()
                continue
            except ApiRefused as error:
                if not listed:
                    self._say_away(f"pods cannot be seen any more: {error}")
                elif error.code != GONE:
                    self.on_news(_CLUSTER, f"pods cannot be watched, and are listed instead: {error}")
            except ApiAway as error:  # a proxy may break a watch: only a failed list means that the server is away
                if not listed:
                    self._say_away(f"its API server does not answer; what runs goes on ({error})")
            except Exception as error:  # noqa: BLE001 (else nothing would be seen any more)
                log.exception("the cluster's answer is not understood")
                self.on_news(_CLUSTER, f"its answer is not understood: {error!r}")
            await patience.again()

    async def _list(self) -> str:
        made = [node for node, machine in self._machines.items() if machine.made]
        pods, version = await self._api.list(self._owner.selector)
        if self._is_away:
            self._is_away = False
            self.on_news(_CLUSTER, "its API server answers again")
        lives = {reading.name: reading.life for reading in map(read, pods)}
        for pod in pods:
            self._look(pod, is_gone=False)
        for name, life in lives.items():
            if name not in self._node_of and (not self._lives or life == self._owner.life):
                self._clean(name)  # of a former life, or its end has been reported
        for node in made:
            if (machine := self._machines.get(node)) is not None and machine.pod not in lives:
                self._gone(node, machine.words or DELETED, taken=True)
        return version

    async def _watch(self, version: str) -> None:
        changes = self._api.watch(self._owner.selector, version, self._limits.cluster_list_s)
        async with contextlib.aclosing(changes):  # type: ignore[type-var]  it is a generator
            async for what, pod in changes:
                self._look(pod, is_gone=what == "DELETED")

    def _look(self, pod: Pod, *, is_gone: bool) -> None:
        reading = read(pod)
        node = self._node_of.get(reading.name)
        if node is None:
            return  # of a former life, or its end has been reported
        machine = self._machines[node]
        machine.made = True
        if reading.ended or is_gone:
            if not is_gone:
                self._clean(machine.pod)
            why = reading.words or machine.words or DELETED
            self._gone(node, why, taken=reading.taken or is_gone)
            return
        if reading.runs:
            self._up(node)
            if machine.late is not None:
                machine.late.cancel()
        if machine.grace_s is not None:
            return  # asked to go by us
        if reading.hopeless:
            self._give_up(node, reading.words)
        elif reading.leaves_s is not None:
            self._expect_end(node, machine, reading.leaves_s)
        if reading.words and reading.words != machine.words and node in self._machines:
            machine.words = reading.words
            self.on_news(node, reading.words)

    def _expect_end(self, node: str, machine: _Machine, leaves_s: float) -> None:
        """The cluster has told a pod to end: give it up in time, as a lost kubelet would never report the end."""
        if machine.overdue is None:
            late_s = leaves_s + self._limits.cluster_end_s
            machine.overdue = asyncio.get_running_loop().call_later(late_s, self._give_up, node, machine.words)

    def _is_late(self, node: str) -> None:
        machine = self._machines[node]
        if self._is_away:  # it may run by now
            loop = asyncio.get_running_loop()
            machine.late = loop.call_later(self._limits.cluster_list_s, self._is_late, node)
        elif machine.grace_s is None:
            why = machine.words or "the cluster says nothing about it"
            self._give_up(node, f"its pod did not run within {self._config.start_s:g} s: {why}")

    def _give_up(self, node: str, words: str) -> None:
        machine = self._machines[node]
        taken = machine.overdue is not None
        if machine.work is not None:
            machine.work.cancel()
        self._clean(machine.pod)
        self._gone(node, words, taken=taken)

    def _gone(self, node: str, words: str, *, taken: bool = False) -> None:
        machine = self._machines.pop(node)
        del self._node_of[machine.pod]
        for timer in (machine.late, machine.overdue):
            if timer is not None:
                timer.cancel()
        self._ended(node, "taken" if taken else "failed", words)

    def _lost(self, why: str) -> None:
        """Another head owns the pods now: start no more machines."""
        self._refused = why
        self.on_news(_CLUSTER, why)

    def _say_away(self, words: str) -> None:
        if not self._is_away:
            self._is_away = True
            log.warning("the cluster is away", why=words)
            self.on_news(_CLUSTER, words)
