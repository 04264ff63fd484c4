"""The inside of a role process: from exec to ready, and out again.

    stdin ─▶ ProcessSpec ─▶ transport ─▶ actor system ─▶ build_role ─▶ spawn ─▶ ProcessReady to the agent
                                                                                ProcessBeacon every second
    SIGTERM ─▶ stop actors in order ─▶ exit 143          actor crashed ─▶ its error as exit note ─▶ exit 70
                                                         by an error that is not its own ─▶ with that note ─▶ exit 75
    main actor ended in good order ─▶ exit 0             could not start ─▶ exit 71, with a note
                                     └ if it may stay (``tenancy``): the next ProcessSpec, from the beginning

Invariants
- The process ends with its parent (``parent_death``), with its main actor, and when any of its actors crashes.
- Nothing is printed but JSON lines on stderr, which the agent keeps in a bounded file.
- The last step is ``os._exit``: a thread that hangs in a kernel must not hold up an orderly stop.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Final

import structlog

from actors.core.reason import is_blameless, reason_of
from actors.host.parent_death import die_with_parent
from actors.rollout import kept_engine
from supervisors.faults.process_faults import ProcessFaults
from supervisors.machine.membership import tenancy
from supervisors.machine.processes import exit_note
from supervisors.machine.processes.logs import log_to_stderr, new_loop
from supervisors.machine.processes.process import EXIT_CRASHED, EXIT_OK, EXIT_PREEMPTED, EXIT_START_FAILED
from supervisors.machine.processes.process_reporter import ProcessReporter
from supervisors.machine.processes.process_spec import ProcessSpec

if TYPE_CHECKING:
    from actors.core.actor import Actor
    from actors.core.system import ActorSystem
    from actors.core.watch import ActorExit
    from actors.roles import AnyArgs

log = structlog.get_logger("headrace.process")

EXIT_TERMINATED = 128 + signal.SIGTERM
_MAY_STAY: Final = (EXIT_OK, EXIT_PREEMPTED)
"""Exit codes of a process whose main actor has ended in good order."""

LastWords = Callable[[BaseException], None]
"""Callback that tells the process's parent the error that ends the process."""


def run_child() -> None:
    """Be a role process; what ``main.py actor`` calls. Does not return."""
    die_with_parent()
    for number in (signal.SIGINT, signal.SIGHUP):  # Ctrl-C and a closed terminal are the parent's business
        signal.signal(number, signal.SIG_IGN)
    note, ends = exit_note.take_pipe(), tenancy.take_pipes()
    if ends is not None:
        kept_engine.allow()
    code = EXIT_START_FAILED
    try:
        spec = ProcessSpec.decode(sys.stdin.buffer.read())
        os.nice(spec.parsed_limits().role_niceness)  # before there are threads: each inherits it
        while True:
            log_to_stderr(spec.name)
            code = EXIT_START_FAILED
            with asyncio.Runner(loop_factory=new_loop) as runner:
                code = runner.run(_main(spec, lambda error: exit_note.leave(note, reason_of(error))))
            if ends is None or code not in _MAY_STAY or (order := _next_order(ends, code, spec)) is None:
                break
            tenancy.redirect_output(Path(order.log_path))
            spec = ProcessSpec.decode(order.spec)
    except BaseException as error:
        exit_note.leave(note, reason_of(error))
        log.exception("the process failed")
    finally:
        logging.shutdown()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _next_order(ends: tenancy.ProcessEnds, code: int, spec: ProcessSpec) -> tenancy.Order | None:
    """Free what only the last job needed, and wait for the next order; None: none came."""
    gc.unfreeze()
    gc.collect()
    return ends.park(code, spec.parsed_limits().parked_process_s)


async def _main(spec: ProcessSpec, last_words: LastWords) -> int:
    from actors.core.system import ActorSystem
    from actors.protocol.who_may_send import guard_for
    from actors.roles import build_role
    from transport.address import new_peer
    from transport.endpoints import split_key
    from transport.link_faults import FaultableTransport
    from transport.zmq.security import load_keys
    from transport.zmq.transport import ZmqTransport

    terminated = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, terminated.set)
    limits = spec.parsed_limits()
    head_key = split_key(spec.args.metrics.endpoint)[1]  # the agent has checked who ordered this process
    keys = load_keys(Path(spec.keys)).of_head(head_key).with_neighbours(spec.neighbours) if spec.keys else None
    links = ZmqTransport(
        new_peer(spec.peer), listen=spec.listen, cluster=spec.cluster, limits=limits, keys=keys, role=spec.args.role
    )
    transport = FaultableTransport(links, limits=limits, seed=spec.seed)
    system = ActorSystem(transport, limits=limits, seed=spec.seed, guard=guard_for(transport.peer))
    # Imported objects live forever: keep them out of every collection.
    return await host(
        spec, system, build_role, terminated, last_words, faults=ProcessFaults(transport.add), on_ready=gc.freeze
    )


async def host(
    spec: ProcessSpec,
    system: ActorSystem,
    build: Callable[[AnyArgs], dict[str, Actor]],
    terminated: asyncio.Event,
    last_words: LastWords,
    *,
    faults: ProcessFaults | None = None,
    pid: int | None = None,
    on_ready: Callable[[], None] = lambda: None,
) -> int:
    """Host a role's actors until ``terminated`` is set or they end; returns the exit code.

    Args:
        system: of this process, not started.
        build: as ``actors.roles.build_role``.
        last_words: called with the error that ends the process, if one does.
        faults: faults that this process can commit on itself; None: it refuses them all.
        pid: of this process, if the operating system does not know it.
        on_ready: called once, when the actors are up.
    """
    await system.start()
    try:
        try:
            addresses = {name: (await system.spawn(name, actor)).address for name, actor in build(spec.args).items()}
        except Exception as error:
            last_words(error)
            log.exception("the role could not be started", role=spec.args.role)
            return EXIT_START_FAILED
        on_ready()
        await system.spawn("reporter", ProcessReporter(spec, addresses, faults or ProcessFaults(), pid))
        log.info("ready", role=spec.args.role, actors=sorted(addresses))
        return await _until_end(system, [*addresses, "reporter"], spec.args.name, terminated, last_words)
    finally:
        try:
            async with asyncio.timeout(system.limits.stop_timeout_s + system.limits.close_timeout_s):
                await system.stop()
        except TimeoutError:
            log.error("the actors did not stop in time")


async def _until_end(
    system: ActorSystem, names: list[str], main_actor: str, terminated: asyncio.Event, last_words: LastWords
) -> int:
    """The exit code that the first decisive event asks for."""
    verdict: asyncio.Future[int] = asyncio.get_running_loop().create_future()

    def decide(code: int) -> None:
        if not verdict.done():
            verdict.set_result(code)

    async def follow(name: str) -> None:
        end = await system.wait_stopped(name)
        if (code := _exit_code(end)) != EXIT_OK or name == main_actor:
            log.info("an actor has ended", actor=name, reason=end.reason)
            if end.error is not None and not verdict.done():
                last_words(end.error)
            decide(code)

    async def obey() -> None:
        await terminated.wait()
        decide(EXIT_TERMINATED)

    tasks = [asyncio.create_task(follow(name), name=f"follow {name}") for name in names]
    tasks.append(asyncio.create_task(obey(), name="obey SIGTERM"))
    try:
        return await verdict
    finally:
        for task in tasks:
            task.cancel()


def _exit_code(end: ActorExit) -> int:
    if end.error is not None:
        return EXIT_PREEMPTED if is_blameless(end.error) else EXIT_CRASHED
    return EXIT_PREEMPTED if end.reason == "preempted" else EXIT_OK
