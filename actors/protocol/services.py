"""Who serves a job in which role: the scheduler knows, for everyone else has to find it in any case.

rewards, weights, trainer, … ──RegisterService──▶ scheduler ◀──LookupService── whoever needs one
                                                      └──ServiceChanged──▶ trainer
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


@message("scheduler.lookup_service")
class LookupService(Message):
    """Somebody asks who serves in this role. Reply: ServiceFound."""

    job: str
    role: str


@message("scheduler.service_found")
class ServiceFound(Message):
    """``policy_version``: of the weights, the newest version that a worker may serve; -1: none yet."""

    address: ActorAddress | None
    policy_version: int = -1


@message("scheduler.service_changed")
class ServiceChanged(Message):
    """The scheduler tells the trainer of a new ``weights``, to which it publishes its current version again."""

    job: str
    role: str
    address: ActorAddress
