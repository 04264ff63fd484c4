"""What an actor may do besides computing: time, randomness, other actors, tasks and threads go through here.

Invariants
- Time is the loop's clock and randomness a named, seeded stream, so the same actor runs under virtual time.
- What an actor has started (tasks, timers, children, thread) ends with it.
"""

from __future__ import annotations

import asyncio
import hashlib
import random
from collections.abc import Callable, Coroutine
from typing import Any, Final, ParamSpec, TypeVar

import structlog

from actors.core.errors import RefusalReason, Refused, WrongHandler
from actors.core.kernel.delivery import current
from actors.core.kernel.port import Hosted, Port, RunningActor
from actors.core.kernel.requests import AskCounts
from actors.core.look import Look, Sight, sight
from actors.core.message import Message, tag_of
from actors.core.ref import ActorRef
from actors.core.watch import Down
from configs.limits import Limits
from transport.address import ActorAddress, PeerId

P = ParamSpec("P")
R = TypeVar("R")

_SEED_BYTES: Final = 8


def named_rng(seed: int, *names: str) -> random.Random:
    """A random stream that depends on the seed and the names only."""
    digest = hashlib.blake2b("\0".join([str(seed), *names]).encode(), digest_size=_SEED_BYTES).digest()
    return random.Random(int.from_bytes(digest, "little"))


class Timer:
    """Delivers a message to its own actor after a while, unless it is cancelled."""

    def __init__(self, cell: RunningActor, delay_s: float, message: Message) -> None:
        self._cell = cell
        self._message = message
        self._handle = asyncio.get_running_loop().call_later(delay_s, self._fire)
        cell.timers[self._handle] = None

    def cancel(self) -> None:
        """Stop the timer; a message already in the mailbox is still handled. Idempotent."""
        self._handle.cancel()
        self._cell.timers.pop(self._handle, None)

    def _fire(self) -> None:
        self._cell.timers.pop(self._handle, None)
        self._cell.put_own(self._message, self._cell.address)


class Context:
    """Connects one actor to the rest of the system; the actor's code has it as ``self.ctx``."""

    def __init__(self, port: Port, cell: RunningActor) -> None:
        self._port = port
        self._cell = cell
        self._streams: dict[str, random.Random] = {}
        self.self_address: ActorAddress = cell.address
        self.limits: Limits = port.limits
        self.log: structlog.typing.FilteringBoundLogger = structlog.get_logger("headrace.actors").bind(actor=cell.name)

    @property
    def sender(self) -> ActorAddress | None:
        """Address of the actor that sent the message being handled; None if no actor did.

        A remote sender's ``endpoint`` may be empty: ``ctx.ref`` of such an address works as long as the link over
        which the message came is up.
        """
        delivery = current.get()
        return None if delivery is None else delivery.sender

    @property
    def sender_process(self) -> PeerId | None:
        """Process from which the message being handled came, even if no actor sent it; None if unknown."""
        delivery = current.get()
        if delivery is None or delivery.caller is None:
            return None if self.sender is None else self.sender.peer
        return delivery.caller.peer

    def now(self) -> float:
        """Seconds on the loop's clock; comparable within this process only."""
        return self._port.now()

    async def sleep(self, delay_s: float) -> None:
        await asyncio.sleep(delay_s)

    def rng(self, name: str) -> random.Random:
        """The actor's random stream of that name; each call returns the same one, which goes on where it stopped."""
        stream = self._streams.get(name)
        if stream is None:
            stream = self._streams[name] = named_rng(self._port.seed, self._cell.name, name)
        return stream

    def ref(self, address: ActorAddress) -> ActorRef:
        """A ref through which this actor speaks."""
        return ActorRef(self._port, address, self.self_address)

    async def successor(self, address: ActorAddress) -> ActorAddress:
        """Address of the same actor in the process that now listens at its endpoint: the same life or a later one.

        Only the process was looked for: the actor itself may be missing there. ``leader.py`` keeps such an address.

        Raises:
            NotSent: nobody answers there within ``limits.connect_timeout_s``, or a process of another name does.
        """
        return await self._port.successor(address)

    async def spawn(self, name: str, actor: Hosted) -> ActorRef:
        """Start a child in this process; it ends with this actor. Returns when its ``on_start`` is done.

        Raises:
            StartFailed, NameTaken.
        """
        cell = await self._port.spawn(name, actor, parent=self._cell)
        return self.ref(cell.address)

    async def stop_child(self, name: str, reason: str = "stopped") -> None:
        """Stop a child of this actor and wait for its end; after ``limits.stop_timeout_s`` by force. Idempotent."""
        child = self._cell.children.get(name)
        if child is not None:
            await self._port.stop_cell(child, reason)

    def watch(self, address: ActorAddress) -> None:
        """Receive one Down when ``address`` is gone, at once if it already is. A second watch of it adds no other Down.

        Raises:
            WrongHandler: the actor has no ``@handles(Down)``.
        """
        if Down not in self._cell.actor.handlers:
            raise WrongHandler(f"{type(self._cell.actor).__name__} watches {address}: it needs a @handles(Down) method")
        self._port.watch(self._cell, address)

    def unwatch(self, address: ActorAddress) -> None:
        """End the watch: no Down of ``address`` comes any more, not even one that is on its way. Idempotent."""
        self._port.unwatch(self._cell, address)

    def start_task(self, coroutine: Coroutine[Any, Any, object], name: str) -> asyncio.Task[object]:
        """Run ``coroutine`` beside the handlers, until the actor ends. If it raises, the actor crashes."""
        return self._cell.start_task(coroutine, name)

    def send_after(self, delay_s: float, message: Message) -> Timer:
        """Send this actor ``message`` after ``delay_s``.

        Raises:
            WrongHandler: the actor does not handle it.
            Refused: the actor has ``limits.mailbox_messages`` timers already.
        """
        if type(message) not in self._cell.actor.handlers:
            raise WrongHandler(f"{type(self._cell.actor).__name__} has no handler for {type(message).__name__}")
        if len(self._cell.timers) >= self.limits.mailbox_messages:
            tag = tag_of(type(message))
            raise Refused(RefusalReason.MAILBOX_FULL, "timers", target=self.self_address, question=tag)
        return Timer(self._cell, delay_s, message)

    async def run_blocking(self, function: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        """Run a function that computes or blocks, on the actor's own thread; calls run one after the other.

        On a virtual-time loop it runs inline.
        """
        return await self._cell.blocking.run(function, *args, **kwargs)

    def stop(self, reason: str = "stopped") -> None:
        """End this actor after the message that is being handled."""
        self._cell.stop(reason)

    def look(self, question: Look) -> Sight:
        """Who waits for whom here (but the handler of ``question``), this process's dead letters and its loop's lag."""
        return sight(self._port, question.longer_than_s, but=tag_of(type(question)))

    def asks(self) -> AskCounts:
        """Counts of the questions of all actors of this process so far, and the overdue ones (``ask_watch.py``)."""
        return self._port.requests.counts(self._port.now())
