"""A head that was started again looks for processes that still run before it starts new ones.

    new supervisor ──ListProcesses──▶ each node agent ──▶ the process runs there ──AdoptProcesses──▶ agent: new owner
                                                      └─▶ nowhere: it ended meanwhile, and is started like a new one

Invariants
- A process is adopted whole or not at all: once the agent has answered, its end is told to the new owner.
- A process that was not ready when its owner died is not adopted: its agent ends it.
- A process that runs keeps its devices, and no other one is given them meanwhile.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING

from actors.core.errors import AskError
from supervisors.machine.membership.nodes import Nodes
from supervisors.tree.children import Running, running_process
from supervisors.tree.messages import AdoptProcesses, ListProcesses, ProcessInfo, ProcessList

if TYPE_CHECKING:
    from actors.core.context import Context


async def adopt(
    context: Context, nodes: Nodes, process: str, actor: str, *, group: Collection[str] = (), lent: bool = False
) -> Running | None:
    """Become the owner of ``process``, wherever it runs; None if no node's agent has it.

    Args:
        context: of the supervisor, which is the new owner.
        actor: the process's main actor.
        group: the processes of its rank group, which share one place.
        lent: whether the process gives its place up when a trainer's rank wants it.
    """
    for node in nodes.present:
        try:
            agent = context.ref(node.agent)
            listed = await agent.ask(ListProcesses(), ProcessList)
            nodes.heard(node.name, {info.name: info.devices for info in listed.processes})
            if _ready(listed, process) is None:
                continue
            found = _ready(await agent.ask(AdoptProcesses(names=(process,)), ProcessList), process)
        except AskError as error:
            context.log.warning("a node agent does not answer; its processes are not adopted", why=str(error))
            continue
        if found is not None:
            nodes.place(process, node.name, found.devices, group, lent=lent)
            what = (node.name, found.pid, found.incarnation, found.addresses)
            return running_process(context, node.agent, process, actor, *what, adopted=True)
    return None


def _ready(listed: ProcessList, process: str) -> ProcessInfo | None:
    return next((info for info in listed.processes if info.name == process and info.addresses), None)
