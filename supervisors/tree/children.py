"""What a supervisor knows of a child, and the two kinds of children: actors of this process, and role processes.

ChildSpec.start(context) ─▶ Running: where it is, how to stop it, how its end will be heard
    actor_child     the actor lives here; its end is a Down
    start_process   a node agent execs it; its end is a ProcessExited, or the Down of the agent
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from actors.core.errors import AskError
from actors.roles import AnyArgs
from configs.limits import DEFAULT_LIMITS, Limits
from supervisors.tree.errors import ChildStartFailed
from supervisors.tree.messages import SpawnProcess, SpawnReply, StopProcess, StopReply
from supervisors.tree.restart_budget import ExitCause, RestartPolicy
from transport.address import ActorAddress

if TYPE_CHECKING:
    from actors.core.actor import Actor
    from actors.core.context import Context


@dataclass(frozen=True)
class Running:
    """A running child is ready."""

    address: ActorAddress
    """Address of its main actor, which the supervisor watches when ``agent`` is None."""
    stop: Callable[[float, ExitCause], Awaitable[None]]
    """Function that stops it within so many seconds; returns when it is gone, or nobody can be asked any more."""
    pid: int
    node: str
    incarnation: int
    addresses: dict[str, ActorAddress] = field(default_factory=dict[str, ActorAddress])
    agent: ActorAddress | None = None
    """The node agent that will tell of its end; watched by the supervisor."""
    adopted: bool = False
    """True if it ran before this start; its former owner is gone."""


@dataclass(frozen=True)
class ChildSpec:
    """A spec says how to start a child and what its end means. ``start`` returns when the child is ready, or raises."""

    name: str
    start: Callable[[Context], Awaitable[Running]]
    role: str = ""
    restart: RestartPolicy = RestartPolicy.PERMANENT
    shutdown_s: float = DEFAULT_LIMITS.stop_timeout_s
    """Deadline of an orderly stop; then it is killed."""
    ready_s: float = DEFAULT_LIMITS.ready_timeout_s
    """Deadline from start to ready."""
    group: str = ""
    """Name of the group that it shares its fate with, under one_for_one: the end of one stops the others, and all start
    at once, none waiting for another to be ready. The last of them in the children's order stops first."""


def actor_child(
    name: str,
    factory: Callable[[], Actor],
    *,
    node: str,
    role: str = "",
    restart: RestartPolicy = RestartPolicy.PERMANENT,
) -> ChildSpec:
    """An actor in the supervisor's own process; ``factory`` makes a fresh one for every start."""

    async def start(context: Context) -> Running:
        address = (await context.spawn(name, factory())).address

        async def stop(deadline_s: float, cause: ExitCause) -> None:
            await context.stop_child(name, str(cause))

        return Running(address, stop, os.getpid(), node, address.peer.incarnation, {name: address})

    return ChildSpec(name, start, role or name, restart)


async def start_process(
    context: Context,
    agent: ActorAddress,
    args: AnyArgs,
    *,
    job: str,
    ready_s: float = DEFAULT_LIMITS.ready_timeout_s,
    beacon_budget_s: float | None = None,
    limits: Limits | None = None,
    may_stay: bool = False,
    devices: tuple[str, ...] | None = None,
) -> Running:
    """Have a node agent, of this or another machine, start a role process and watch it.

    If it is cancelled, no process stays there, although the agent's answer may be on its way.

    Args:
        job: whom it serves, by name; the process is called ``<job>.<args.name>`` at its agent.
        beacon_budget_s: how long its event loop may be silent; default: as ``limits`` say.
        limits: of the process; default: those of its node agent.
        may_stay: when its work is over it may be given other work, of any job.
        devices: those of its machine that it is to see; None: all that the machine lends.

    Raises:
        ChildStartFailed: it did not become ready, or its agent gave no answer.
    """
    order = SpawnProcess(
        name=f"{job}.{args.name}",
        args=args,
        ready_timeout_s=ready_s,
        beacon_budget_s=beacon_budget_s or (limits or context.limits).beacon_budget_s,
        limits=limits.model_dump_json() if limits else "",
        may_stay=may_stay,
        devices=devices,
    )
    overhead_s = context.limits.spawn_overhead_s
    try:
        reply = await context.ref(agent).ask(order, SpawnReply, timeout_s=order.ready_timeout_s + overhead_s)
    except asyncio.CancelledError:
        patience_s = min(overhead_s, context.limits.stop_timeout_s / 2)  # who cuts a start waits for longer
        await _ask_to_stop(context, agent, order.name, 0.0, ExitCause.STOPPED, patience_s)
        raise
    except AskError as error:
        why = f"its node agent gave no answer: {error}"
        raise ChildStartFailed(order.name, ExitCause.UNREACHABLE, why, node=agent.peer.name) from error
    if reply.started is None:
        failure = reply.failure
        assert failure is not None, "a SpawnReply says what failed when nothing started"
        raise ChildStartFailed(
            order.name, failure.cause, failure.detail, failure.log_tail, failure.log_path, reason=failure.reason
        )
    started = reply.started
    found = (started.node, started.pid, started.incarnation)
    return running_process(context, agent, order.name, order.args.name, *found, started.addresses)


def running_process(
    context: Context,
    agent: ActorAddress,
    process: str,
    actor: str,
    node: str,
    pid: int,
    incarnation: int,
    addresses: dict[str, ActorAddress],
    *,
    adopted: bool = False,
) -> Running:
    """What a supervisor keeps of a ready ``process`` of ``agent``, whose main actor is ``actor``."""

    async def stop(deadline_s: float, cause: ExitCause) -> None:
        await _ask_to_stop(context, agent, process, deadline_s, cause, deadline_s + context.limits.spawn_overhead_s)

    address = addresses.get(actor) or next(iter(addresses.values()))
    return Running(address, stop, pid, node, incarnation, addresses, agent, adopted)


async def _ask_to_stop(
    context: Context, agent: ActorAddress, process: str, deadline_s: float, cause: ExitCause, timeout_s: float
) -> None:
    question = StopProcess(name=process, deadline_s=deadline_s, cause=cause)
    try:
        await context.ref(agent).ask(question, StopReply, timeout_s=timeout_s)
    except AskError as error:
        context.log.warning("a process could not be stopped through its agent", process=process, why=str(error))
