"""Clusters for tests, of a recorded or of a real API server: the provider's client, and the administrator's."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx2
import yaml

from configs.kubernetes_schema import KubernetesConfig
from configs.limits import Limits
from supervisors.providers.kubernetes.lightkube_api import LightkubeApi
from supervisors.providers.kubernetes.pods import Owner
from supervisors.providers.kubernetes.provider import KubernetesProvider
from tests.kubernetes.api_server import ApiServer
from tests.kubernetes.kubelet import Kubelet
from tests.kubernetes.recorded_api import RecordedApi

NAMESPACE = "train"
MARK = "headrace-demo-0a1b2c3d"
HEADRACE = [sys.executable, "-P", "-m", "main"]


@dataclass
class Cluster:
    """It is one API server, and somebody who runs its pods."""

    directory: Path
    kubeconfig: Path
    kubelet: Kubelet
    admin: httpx2.AsyncClient
    transport: httpx2.AsyncBaseTransport | None = None
    """Connection of the provider's clients; None: the real one."""

    def provider(
        self, join: str, *, life: str = "4e5f", limits: Limits | None = None, notice_s: float = 0.0, **changes: Any
    ) -> KubernetesProvider:
        """One that has still to be opened."""
        config = KubernetesConfig(**{"image": "headrace:1", "command": HEADRACE, "namespace": NAMESPACE} | changes)
        limits = limits or Limits(stop_timeout_s=10.0)
        api = LightkubeApi.of(config, limits, kubeconfig=self.kubeconfig, transport=self.transport)
        owner = Owner("demo", MARK, life)
        return KubernetesProvider(config, api, owner, join=join, slots=1, notice_s=notice_s, limits=limits)

    async def pods(self) -> list[str]:
        """Names of the pods that the API server has."""
        listed = (await self.admin.get(f"/api/v1/namespaces/{NAMESPACE}/pods")).json()
        return [pod["metadata"]["name"] for pod in listed["items"]]


@contextlib.asynccontextmanager
async def recorded(directory: Path, api: RecordedApi | None = None) -> AsyncIterator[Cluster]:
    api = api or RecordedApi()
    kubeconfig = directory / "recorded.kubeconfig"
    kubeconfig.write_text(
        yaml.safe_dump({
            "current-context": "test",
            "clusters": [{"name": "test", "cluster": {"server": "http://recorded"}}],
            "users": [{"name": "head", "user": {}}],
            "contexts": [{"name": "test", "context": {"cluster": "test", "user": "head"}}],
        })
    )  # fmt: skip
    admin = httpx2.AsyncClient(base_url="http://recorded", transport=api)
    async with _run(Cluster(directory, kubeconfig, Kubelet(admin, NAMESPACE, directory), admin, api)) as cluster:
        yield cluster


@contextlib.asynccontextmanager
async def real(directory: Path, server: ApiServer, user: str = "admin") -> AsyncIterator[Cluster]:
    """On a server that has the namespace, and rights for ``user``."""
    admin = server.admin()
    kubelet = Kubelet(admin, NAMESPACE, directory)
    async with _run(Cluster(directory, server.kubeconfig(user, NAMESPACE), kubelet, admin)) as cluster:
        yield cluster


@contextlib.asynccontextmanager
async def _run(cluster: Cluster) -> AsyncIterator[Cluster]:
    await cluster.kubelet.start()
    try:
        yield cluster
    finally:
        await cluster.kubelet.stop()
        await cluster.admin.aclose()
