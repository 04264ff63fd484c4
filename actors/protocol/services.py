"""Who serves a job in which role: the scheduler knows, since every actor has to find the scheduler anyway.

rewards, weights, trainer, … ──RegisterService──▶ scheduler ◀──LookupService── an actor that needs one
                                   scheduler, weights ──ServiceChanged──▶ trainer
"""

from __future__ import annotations

from actors.core.message import Message, message
from transport.address import ActorAddress


@message("scheduler.register_service")
class RegisterService(Message):
    """A service of the job is ready at ``address``. Reply: Acknowledged.

    ``role``: ``weights``, ``rewards``, ``prompts``, ``trainer``, ``ranker``, ``gateway`` or ``job``; or a rank's own
    name, such as ``trainer.rank1``, for its leader to find. A newer incarnation replaces the older one; the trainer is
    told of new ``weights`` by ServiceChanged, the workers by PullVersion.
    """

    job: str
    role: str
    address: ActorAddress
    moved: bool = False
    """Whether a ``gateway`` has another address than before, so that agents cannot reach it: their episodes end."""


@message("scheduler.lookup_service")
class LookupService(Message):
    """An actor asks which service has this role. Reply: ServiceFound."""

    job: str
    role: str


@message("scheduler.service_found")
class ServiceFound(Message):
    """Names the service. ``policy_version``: of ``weights``, the newest that a worker may serve; -1: none yet."""

    address: ActorAddress | None
    policy_version: int = -1


@message("scheduler.service_changed")
class ServiceChanged(Message):
    """The trainer is told to publish its current version again: ``weights`` is a new life, or has lost a segment."""

    job: str
    role: str
    address: ActorAddress
