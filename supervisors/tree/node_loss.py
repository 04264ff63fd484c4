"""Tells whether a node agent that has fallen silent is gone, or has only lost a link."""

from __future__ import annotations

from typing import TYPE_CHECKING

from actors.core.errors import AskError
from actors.core.patience import Patience
from supervisors.tree.messages import ListProcesses, ProcessList
from transport.address import ActorAddress

if TYPE_CHECKING:
    from actors.core.context import Context


async def still_has(context: Context, agent: ActorAddress, grace_s: float) -> set[int]:
    """The ids of the processes that ``agent`` still runs, if it answers within ``grace_s``; else none.

    The address names one life of the agent: a new agent of the same name does not answer for it.
    """
    patience = Patience(context.limits, context.rng("patience"), grace_s)
    while patience.left_s > 0:
        try:
            reply = await context.ref(agent).ask(ListProcesses(), ProcessList, timeout_s=patience.left_s)
        except AskError:
            await patience.again()
            continue
        return {process.pid for process in reply.processes}
    return set()
