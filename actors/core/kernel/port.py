"""The interface of a process's router, through which the parts of the kernel and the classes above it use each other.

    Ref, Context, Look ─▶ Port ◀─ Questions, StreamTable, DeathWatch, Cell, Inbound
                            ▲
                          Router, which is made of all of them

Invariants
- A part holds a Port, never the router; so parts do not import each other in a circle.
- The router owns each table of what is open (questions, producers), and one part works on it.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Coroutine, Mapping
from typing import Any, ClassVar, Protocol, TypeVar

from actors.core.kernel.answers import Caller, Refusal
from actors.core.kernel.blocking import BlockingThread
from actors.core.kernel.dead_letters import DeadLetters
from actors.core.kernel.delivery import Delivery, Handler, StreamWindow
from actors.core.kernel.links import Links
from actors.core.kernel.loop_lag import LoopLag
from actors.core.kernel.mailbox import Mailbox
from actors.core.kernel.requests import Requests
from actors.core.kernel.streams import Producer, Stream
from actors.core.message import Message
from actors.core.watch import ActorExit, Gone
from configs.limits import Limits
from transport.address import ActorAddress, PeerId
from transport.envelope import Kind
from transport.transport import Lane, SendOutcome

R = TypeVar("R", bound=Message)


class Hosted(Protocol):
    """An actor as the kernel sees it."""

    ctx: Any
    """Context of the actor; untyped, since this file may not import it."""

    handlers: ClassVar[dict[type[Message], Handler]]

    async def on_start(self) -> None: ...
    async def on_stop(self) -> None: ...


class RunningActor(Protocol):
    """A cell, which runs one actor, as the actor's context and the rest of the kernel see it."""

    name: str
    address: ActorAddress
    actor: Hosted
    mailbox: Mailbox
    blocking: BlockingThread
    children: dict[str, RunningActor]
    watching: dict[ActorAddress, int]
    timers: dict[asyncio.TimerHandle, None]
    working: dict[Delivery, asyncio.Task[None] | None]
    ended: asyncio.Future[ActorExit]

    def start_task(self, coroutine: Coroutine[Any, Any, object], name: str) -> asyncio.Task[object]: ...
    def put_own(self, message: Message, sender: ActorAddress, watch_id: int = 0) -> None: ...
    def stop(self, reason: str = "stopped") -> None: ...
    async def kill(self) -> None: ...


class Port(Protocol):
    """A port gives access to a process's tables and operations. ``router.py`` describes each method."""

    limits: Limits
    seed: int
    own: PeerId
    loop: asyncio.AbstractEventLoop
    links: Links
    requests: Requests
    producers: dict[Caller, Producer]
    dead_letters: DeadLetters
    lag: LoopLag

    @property
    def endpoint(self) -> str: ...
    @property
    def cells(self) -> Mapping[str, RunningActor]: ...
    def now(self) -> float: ...
    def next_id(self) -> int: ...
    def count(self, what: str) -> None: ...

    async def spawn(self, name: str, actor: Hosted, parent: RunningActor | None = None) -> RunningActor: ...
    async def stop_cell(self, cell: RunningActor, reason: str = "stopped") -> ActorExit: ...
    def cell_ended(self, name: str, ended: ActorExit) -> None: ...
    def watch(self, cell: RunningActor, target: ActorAddress) -> None: ...
    def unwatch(self, cell: RunningActor, target: ActorAddress) -> None: ...

    def tell(self, owner: ActorAddress | None, address: ActorAddress, message: Message, lane: Lane) -> SendOutcome: ...
    def ask(
        self, owner: ActorAddress | None, address: ActorAddress, message: Message, reply: type[R],
        timeout_s: float | None, lane: Lane,
    ) -> Coroutine[Any, Any, R]: ...  # fmt: skip
    def stream(
        self, owner: ActorAddress | None, address: ActorAddress, message: Message, item: type[R], lane: Lane,
        window: StreamWindow,
    ) -> Stream[R]: ...  # fmt: skip
    async def successor(self, address: ActorAddress) -> ActorAddress: ...
    def post(
        self, peer: PeerId, endpoint: str, lane: Lane, kind: Kind, message: Message | None,
        *, source: str = "", target: str = "", request_id: int = 0, number: int = 0, number_bytes: int = 0,
        deadline_at: float | None = None, surely: bool = False,
    ) -> SendOutcome: ...  # fmt: skip
    def cancel(self, target: str, caller: Caller) -> None: ...

    def admit(self, target: str, kind: type[Message], *, stream: bool) -> tuple[RunningActor, Handler] | Refusal: ...
    def deliver_local(
        self, sender: ActorAddress | None, target: str, message: Message, caller: Caller | None = None,
        deadline_at: float | None = None, *, window: StreamWindow | None = None,
    ) -> Refusal | None: ...  # fmt: skip
    def peer_gone(self, peer: PeerId, why: str, reason: Gone) -> None: ...

    async def produce(self, delivery: Delivery, items: AsyncIterator[Message]) -> None: ...
    def answer(self, delivery: Delivery, kind: Kind, message: Message | None, number: int = 0) -> None: ...
    def send_answer(self, caller: Caller, kind: Kind, message: Message | None, lane: Lane, number: int = 0) -> None: ...
    def settle(self, request_id: int, kind: Kind, message: Message | None, number: int) -> None: ...
    def note_refused(self, refusal: Refusal, tag: str, source: str, target: str) -> None: ...
