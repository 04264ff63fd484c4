"""What the weight server tells the scheduler."""

from __future__ import annotations

from actors.core.message import Message, message
from transport.address import ActorAddress


@message("scheduler.version_available")
class VersionAvailable(Message):
    """All of a version is published and can be pulled from ``weights``."""

    job: str
    policy_version: int
    weights: ActorAddress
