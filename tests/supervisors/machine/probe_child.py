"""A role process for tests: like ``main.py actor``, with roles that answer, crash, hang or hold the GIL when told."""

from __future__ import annotations

import asyncio
import ctypes
import os
import sys

from actors.core.actor import Actor, concurrent, handles
from actors.core.message import Message, message
from actors.core.senders import SenderKind
from actors.protocol.who_may_send import WHO_MAY_SEND
from actors.roles import ROLES, RoleArgs
from transport.errors import HeadraceError


@message("probe.ping")
class Ping(Message):
    pass


@message("probe.pong")
class Pong(Message):
    pid: int
    node: str


@message("probe.crash")
class Crash(Message):
    pass


class NoSuchModel(HeadraceError):
    permanent = True


@message("probe.crash_for_good")
class CrashForGood(Message):
    pass


class ServiceGone(HeadraceError):
    blameless = True


@message("probe.lose")
class Lose(Message):
    pass


@message("probe.finish")
class Finish(Message):
    reason: str


@message("probe.hold_gil")
class HoldGil(Message):
    seconds: int


class Probe(Actor):
    def __init__(self, args: RoleArgs) -> None:
        self._args = args

    @handles(Ping)
    @concurrent
    async def ping(self, message: Ping) -> Pong:
        return Pong(pid=os.getpid(), node=self._args.node)

    @handles(Crash)
    async def crash(self, message: Crash) -> None:
        raise RuntimeError("told to crash")

    @handles(CrashForGood)
    async def crash_for_good(self, message: CrashForGood) -> None:
        raise NoSuchModel("model.path: /nowhere is gone")

    @handles(Lose)
    async def lose(self, message: Lose) -> None:
        raise ServiceGone("what it needs has gone")

    @handles(Finish)
    async def finish(self, message: Finish) -> None:
        self.ctx.stop(message.reason)

    @handles(HoldGil)
    async def hold_gil(self, message: HoldGil) -> None:
        ctypes.PyDLL(None).sleep(message.seconds)  # PyDLL keeps the GIL: no Python thread runs meanwhile


class NeverReady(Probe):
    async def on_start(self) -> None:
        await asyncio.Event().wait()


class Hopeless(Probe):
    async def on_start(self) -> None:
        raise NoSuchModel("model.path: /nowhere holds no model")


class Stubborn(Probe):
    async def on_stop(self) -> None:
        ctypes.PyDLL(None).sleep(60)


def build(args: RoleArgs) -> dict[str, Actor]:
    return {args.name: Probe(args)}


def build_never(args: RoleArgs) -> dict[str, Actor]:
    return {args.name: NeverReady(args)}


def build_broken(args: RoleArgs) -> dict[str, Actor]:
    raise FileNotFoundError("no model at /nowhere")


def build_hopeless(args: RoleArgs) -> dict[str, Actor]:
    return {args.name: Hopeless(args)}


def build_stubborn(args: RoleArgs) -> dict[str, Actor]:
    return {args.name: Stubborn(args)}


if __name__ == "__main__":
    sys.modules["probe_child"] = sys.modules["__main__"]
    for role in ("probe", "never", "broken", "hopeless", "stubborn"):
        ROLES[role] = f"probe_child:build{'' if role == 'probe' else '_' + role}"
    for tag in ("probe.ping", "probe.crash", "probe.crash_for_good", "probe.lose", "probe.finish", "probe.hold_gil"):
        WHO_MAY_SEND[tag] = frozenset([SenderKind.HEAD])
    from supervisors.machine.processes.child import run_child

    run_child()
