"""What the head and the model server say to each other.

model server ──FindProcess──▶ head ──ProcessFound──▶ model server        who trains, who samples: they may be restarted
             ──Listens──▶ head                                           told: clients can come
head ──QueryServing──▶ model server ──ServingState──▶ head               for people

Always true
- An address is that of one life. Whoever finds nobody there any more asks again, and waits for the next life.
"""

from __future__ import annotations

from typing import Any

from actors.core.message import Message, message
from transport.address import ActorAddress


@message("serving.find")
class FindProcess(Message):
    """Where is the training service, or the sampler, of that name? Reply: ProcessFound, once it is ready."""

    name: str


@message("serving.found")
class ProcessFound(Message):
    address: ActorAddress


@message("serving.listens")
class Listens(Message):
    """Told: the model server takes requests at ``url``."""

    url: str


@message("serving.query")
class QueryServing(Message):
    """Who is served, and with what? Reply: ServingState."""


@message("serving.state")
class ServingState(Message):
    """Holds a row for each model of a client that is alive."""

    rows: list[dict[str, Any]]
