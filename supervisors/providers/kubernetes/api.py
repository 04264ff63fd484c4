"""The requests that the provider makes of an API server; ``lightkube_api.py`` implements them.

A request can fail in two ways: the cluster has refused it, in its own words (``ApiRefused``), or has not answered
(``ApiAway``), so that it is unknown whether the request was carried out.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from typing import Any, Final, Protocol

from supervisors.tree.errors import ProviderError

Pod = dict[str, Any]
CONFLICT: Final = 409
NOT_FOUND: Final = 404
GONE: Final = 410


class ApiRefused(ProviderError):
    """The cluster has refused a request. The message is the cluster's own."""

    def __init__(self, code: int, message: str, reason: str = "") -> None:
        super().__init__(message)
        self.code = code
        self.reason = reason
        """The cluster's word for the reason, such as ``AlreadyExists``."""


class ApiAway(ProviderError):
    """The API server has not answered, or has said that it cannot answer now. Ask again later."""


class ClusterApi(Protocol):
    """The API serves requests in one namespace of a cluster. Every method may raise ``ApiRefused`` and ``ApiAway``."""

    @property
    def namespace(self) -> str: ...
    async def create(self, pod: Pod) -> None: ...
    async def delete(self, name: str, grace_s: int) -> None: ...
    async def list(self, labels: Mapping[str, str]) -> tuple[list[Pod], str]:
        """The pods with these labels, and the version of the cluster's state in which they were listed."""
        ...

    def watch(self, labels: Mapping[str, str], version: str, timeout_s: float) -> AsyncIterator[tuple[str, Pod]]:
        """Changes after ``version``: ``ADDED``, ``MODIFIED`` or ``DELETED``, and the pod."""
        ...

    async def log(self, name: str, lines: int) -> list[str]:
        """The last lines of a pod's log."""
        ...

    async def get_lease(self, name: str) -> dict[str, Any]: ...
    async def create_lease(self, lease: dict[str, Any]) -> dict[str, Any]: ...
    async def replace_lease(self, lease: dict[str, Any]) -> dict[str, Any]:
        """Write ``lease``; refused with a conflict if it was changed since it was read."""
        ...

    async def delete_lease(self, name: str) -> None: ...
    async def close(self) -> None: ...
