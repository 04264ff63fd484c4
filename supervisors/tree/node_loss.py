"""After a node agent has fallen silent: is it really gone, or was it one lost link?"""

from __future__ import annotations

from typing import TYPE_CHECKING

from actors.core.errors import AskError
from supervisors.tree.messages import ListProcesses, ProcessList
from transport.address import ActorAddress

if TYPE_CHECKING:
    from actors.core.context import Context


async def still_has(context: Context, agent: ActorAddress, grace_s: float) -> set[int]:
    """The process ids that ``agent`` still runs if it answers within ``grace_s``; else none.

    The address names one life of the agent: a new agent of the same name does not answer for it.
    """
    until_s = context.now() + grace_s
    while (left_s := until_s - context.now()) > 0:
        try:
            reply = await context.ref(agent).ask(ListProcesses(), ProcessList, timeout_s=left_s)
        except AskError:
            await context.sleep(min(context.limits.backoff_first_s, left_s))
            continue
        return {process.pid for process in reply.processes}
    return set()
