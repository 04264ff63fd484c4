"""Specifies a supervisor's children, and starts both kinds: actors of this process, and role processes.

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
    """Says where a child that has become ready runs, and how to stop it."""

    address: ActorAddress
    """Address of the child's main actor, which the supervisor watches when ``agent`` is None."""
    stop: Callable[[float, ExitCause], Awaitable[None]]
    """Function that stops the child within a deadline in seconds; returns once it is gone or its agent silent."""
    pid: int
    node: str
    incarnation: int
    addresses: dict[str, ActorAddress] = field(default_factory=dict[str, ActorAddress])
    agent: ActorAddress | None = None
    """Node agent that reports the child's end; watched by the supervisor."""
    adopted: bool = False
    """Flag that the child ran before this start; its former owner is gone."""


@dataclass(frozen=True)
class ChildSpec:
    """Says how to start a child, and what its end means. ``start`` returns when the child is ready, or raises."""

    name: str
    start: Callable[[Context], Awaitable[Running]]
    role: str = ""
    restart: RestartPolicy = RestartPolicy.PERMANENT
    shutdown_s: float = DEFAULT_LIMITS.stop_timeout_s
    """Seconds for a clean stop; then the child is killed."""
    ready_s: float = DEFAULT_LIMITS.ready_timeout_s
    """Seconds from start to ready, at most."""
    group: str = ""
    """Name of the child's group under one_for_one: the end of one member stops the others, and all start at once, none
    waiting for another to be ready. The last member in the children's order stops first."""


def actor_child(
    name: str,
    factory: Callable[[], Actor],
    *,
    node: str,
    role: str = "",
    restart: RestartPolicy = RestartPolicy.PERMANENT,
) -> ChildSpec:
    """Specify an actor in the supervisor's own process; ``factory`` makes a fresh one for every start."""

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

    If this call is cancelled, it stops the process, even one that the agent has just started.

    Args:
        job: name of the job that it serves; its agent calls the process ``<job>.<args.name>``.
        beacon_budget_s: seconds for which its event loop may be silent; default: as ``limits`` say.
        limits: limits of the process; default: those of its node agent.
        may_stay: whether it may be given other work, of any job, when its work is over.
        devices: devices of its machine that it is to see; None: all that the machine lends.

    Raises:
        ChildStartFailed: the process did not become ready, or its agent gave no answer.
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
        patience_s = min(overhead_s, context.limits.stop_timeout_s / 2)  # whoever cancels a start waits longer
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
    """The ``Running`` of a ready ``process`` of ``agent``, whose main actor is ``actor``."""

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
