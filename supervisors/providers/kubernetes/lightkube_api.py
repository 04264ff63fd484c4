"""Asks the API server through lightkube. Only this file uses that library; it is loaded only if a job asks for pods."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any, Final

import httpx2  # pyright: ignore[reportMissingImports] - an optional extra
import msgspec
from lightkube import ApiError, AsyncClient, KubeConfig  # pyright: ignore[reportMissingImports] - an optional extra
from lightkube.core.exceptions import ConfigError  # pyright: ignore[reportMissingImports] - an optional extra
from lightkube.resources.coordination_v1 import Lease  # pyright: ignore[reportMissingImports] - an optional extra
from lightkube.resources.core_v1 import Pod as PodResource  # pyright: ignore[reportMissingImports] - an optional extra

from configs.kubernetes_schema import KubernetesConfig
from configs.limits import Limits
from supervisors.providers.kubernetes.api import ApiAway, ApiRefused, Pod
from supervisors.tree.errors import ProviderError

_AWAY: Final = 500
"""Codes from here on, and 429, say that the server cannot answer now."""
_TOO_MANY: Final = 429


class LightkubeApi:
    """``LightkubeApi`` implements ``api.ClusterApi`` for one namespace of a cluster."""

    def __init__(self, client: AsyncClient, answer_s: float) -> None:
        self._client, self._answer_s = client, answer_s

    @classmethod
    def of(
        cls,
        config: KubernetesConfig,
        limits: Limits,
        *,
        kubeconfig: Path | None = None,
        transport: httpx2.AsyncBaseTransport | None = None,
    ) -> LightkubeApi:
        """Connect to the cluster that ``config`` names, with this pod's ServiceAccount or a kubeconfig.

        Raises:
            ProviderError: there is no such configuration.
        """
        timeout = httpx2.Timeout(limits.cluster_answer_s)
        try:
            found = KubeConfig.from_env() if kubeconfig is None else KubeConfig.from_file(kubeconfig)
            one = found.get(config.context)
            client = AsyncClient(one, namespace=config.namespace, timeout=timeout, transport=transport, lazy=False)
        except (ConfigError, OSError, ValueError, KeyError, AssertionError) as error:  # the last for a missing user
            raise ProviderError(
                f"no Kubernetes cluster is configured: {error}; set KUBECONFIG or provider.kubernetes.context, or run "
                "the head in a pod with a ServiceAccount"
            ) from error
        return cls(client, limits.cluster_answer_s)

    @property
    def namespace(self) -> str:
        return str(self._client.namespace)

    async def create(self, pod: Pod) -> None:
        async with _errors_translated(), asyncio.timeout(self._answer_s):
            await self._client.create(_object_of(PodResource, pod))

    async def delete(self, name: str, grace_s: int) -> None:
        async with _errors_translated(), asyncio.timeout(self._answer_s):
            await self._client.delete(PodResource, name, grace_period=grace_s)

    async def list(self, labels: Mapping[str, str]) -> tuple[list[Pod], str]:
        async with _errors_translated(), asyncio.timeout(self._answer_s):
            found = self._client.list(PodResource, labels=dict(labels))
            pods = [pod.to_dict() async for pod in found]
            return pods, str(found.resourceVersion)

    async def watch(self, labels: Mapping[str, str], version: str, timeout_s: float) -> AsyncIterator[tuple[str, Pod]]:
        async with _errors_translated():  # no timeout of our own: the caller gives one
            async for what, pod in self._client.watch(
                PodResource, labels=dict(labels), resource_version=version, server_timeout=max(1, int(timeout_s))
            ):
                yield str(what), pod.to_dict()

    async def log(self, name: str, lines: int) -> list[str]:
        async with _errors_translated(), asyncio.timeout(self._answer_s):
            return [line async for line in self._client.log(name, tail_lines=lines, newlines=False)]

    async def get_lease(self, name: str) -> dict[str, Any]:
        async with _errors_translated(), asyncio.timeout(self._answer_s):
            return (await self._client.get(Lease, name)).to_dict()

    async def create_lease(self, lease: dict[str, Any]) -> dict[str, Any]:
        async with _errors_translated(), asyncio.timeout(self._answer_s):
            return (await self._client.create(_object_of(Lease, lease))).to_dict()

    async def replace_lease(self, lease: dict[str, Any]) -> dict[str, Any]:
        async with _errors_translated(), asyncio.timeout(self._answer_s):
            return (await self._client.replace(_object_of(Lease, lease))).to_dict()

    async def delete_lease(self, name: str) -> None:
        async with _errors_translated(), asyncio.timeout(self._answer_s):
            await self._client.delete(Lease, name)

    async def close(self) -> None:
        await self._client.close()


def _object_of(resource: Any, of: Mapping[str, Any]) -> Any:
    """An object of the class ``resource``; untyped, since the library types its creation too loosely."""
    return resource.from_dict(of)


@contextlib.asynccontextmanager
async def _errors_translated() -> AsyncIterator[None]:
    """Turn the library's errors into ours."""
    try:
        yield
    except ApiError as error:
        code, message = int(error.status.code or 0), " ".join(str(error.status.message).split())
        if code >= _AWAY or code == _TOO_MANY:
            raise ApiAway(message) from error
        raise ApiRefused(code, message, str(error.status.reason or "")) from error
    except httpx2.HTTPStatusError as error:  # from a proxy, or a server that is starting: its body has no Status
        code = error.response.status_code
        if code >= _AWAY or code == _TOO_MANY:
            raise ApiAway(str(error)) from error
        raise ApiRefused(code, str(error)) from error
    except TimeoutError as error:
        raise ApiAway("it takes longer than limits.cluster_answer_s") from error
    except (httpx2.HTTPError, msgspec.MsgspecError) as error:
        raise ApiAway(f"{type(error).__name__}: {error}".rstrip(": ")) from error
