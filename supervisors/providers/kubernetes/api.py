"""What the provider asks of an API server; ``lightkube_api.py`` asks it.

Two ways to fail: the cluster has said no, in its own words (``ApiRefused``), or nobody has answered (``ApiAway``),
which is no news of anything that was asked for.
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
    """The cluster has refused a request. The message is its own; asked again it says the same."""

    def __init__(self, code: int, message: str, reason: str = "") -> None:
        super().__init__(message)
        self.code = code
        self.reason = reason
        """Word for it, such as ``AlreadyExists``."""


class ApiAway(ProviderError):
    """The API server has not answered, or said that it cannot. Ask again later."""


class ClusterApi(Protocol):
    """It is one namespace of a cluster. Every method may raise ``ApiRefused`` and ``ApiAway``."""

    @property
    def namespace(self) -> str: ...
    async def create(self, pod: Pod) -> None: ...
    async def delete(self, name: str, grace_s: int) -> None: ...
    async def list(self, labels: Mapping[str, str]) -> tuple[list[Pod], str]:
        """Pods with these labels, and the version of the cluster's state at which that was so."""
        ...

    def watch(self, labels: Mapping[str, str], version: str, timeout_s: float) -> AsyncIterator[tuple[str, Pod]]:
        """Changes after ``version``: ``ADDED``, ``MODIFIED`` or ``DELETED``, and the pod."""
        ...

    async def log(self, name: str, lines: int) -> list[str]:
        """The last lines of what a pod has said."""
        ...

    async def get_lease(self, name: str) -> dict[str, Any]: ...
    async def create_lease(self, lease: dict[str, Any]) -> dict[str, Any]: ...
    async def replace_lease(self, lease: dict[str, Any]) -> dict[str, Any]:
        """It conflicts if somebody else has changed the lease since ``lease`` was read."""
        ...

    async def delete_lease(self, name: str) -> None: ...
    async def close(self) -> None: ...
