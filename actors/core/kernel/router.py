"""Where messages go: out through the links, or straight into a mailbox of this process.

    ref.tell / ask / stream ─▶ target here?  ─▶ admit ─▶ mailbox                       nothing is encoded
                              └▶ elsewhere   ─▶ Links ─▶ Transport
    Transport ─▶ inbound.py ─▶ admit ─▶ decode ─▶ mailbox

Invariants
- The outcomes are the same for a target in this process and in another one.
- An answer, a Down and the end of a stream are never lost on a link that is up: rather the link is broken.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from functools import partial
from typing import TypeVar

from actors.core.context import Context
from actors.core.errors import NameTaken, NotSent, RefusalReason, StartFailed, WrongReply
from actors.core.kernel.answers import Caller, NoReply, Refusal, TargetGone, error_of
from actors.core.kernel.cell import Cell
from actors.core.kernel.dead_letters import LINK_LOST, NO_LINK, NO_RECEIVER, DeadLetters
from actors.core.kernel.death_watch import DeathWatch
from actors.core.kernel.delivery import Delivery, Handler, StreamWindow
from actors.core.kernel.links import Links
from actors.core.kernel.loop_lag import LoopLag
from actors.core.kernel.port import Hosted, RunningActor
from actors.core.kernel.questions import Questions
from actors.core.kernel.requests import Requests
from actors.core.kernel.stream_table import StreamTable
from actors.core.kernel.streams import Producer, Stream
from actors.core.message import Message, tag_of
from actors.core.watch import ActorExit, Gone
from configs.limits import Limits
from transport.address import ActorAddress, PeerId
from transport.codec import encode_body
from transport.envelope import Envelope, Kind
from transport.errors import TransportError
from transport.transport import Lane, SendOutcome, Transport

R = TypeVar("R", bound=Message)


class Router:
    """Holds the actors of one process, and their open questions, streams and watches."""

    def __init__(self, transport: Transport, limits: Limits, seed: int) -> None:
        self.transport = transport
        self.limits = limits
        self.seed = seed
        self.own = transport.peer
        self.loop = asyncio.get_running_loop()
        self.cells: dict[str, Cell] = {}
        self.exits: dict[str, ActorExit] = {}
        self.requests = Requests(limits.pending_asks)
        self.producers: dict[Caller, Producer] = {}
        self.counters: Counter[str] = Counter()
        self.dead_letters = DeadLetters(limits.dead_letters_kept)
        self.lag = LoopLag()
        self.links = Links(
            transport,
            limits,
            self.requests.mark_sent,
            partial(self.peer_gone, reason=Gone.UNREACHABLE),
            partial(self._note_dead, LINK_LOST),
        )
        self.stopping = False
        self._last_id = 0
        questions = Questions(self)
        self.deaths = DeathWatch(self)
        self.streams = StreamTable(self, questions)
        self.ask, self.stream, self.produce = questions.ask, self.streams.make, self.streams.produce
        self.watch, self.unwatch = self.deaths.watch, self.deaths.unwatch

    @property
    def endpoint(self) -> str:
        return self.transport.endpoint

    def now(self) -> float:
        return self.loop.time()

    def next_id(self) -> int:
        """Unique within this process; never 0."""
        self._last_id += 1
        return self._last_id

    def count(self, what: str) -> None:
        """Count one more ``what``, for ``ActorSystem.counters``."""
        self.counters[what] += 1

    async def spawn(self, name: str, actor: Hosted, parent: RunningActor | None = None) -> Cell:
        """Start an actor; returns when ``on_start`` is done."""
        if self.stopping:
            raise StartFailed(f"{name}: the system is stopping")
        if name in self.cells:
            raise NameTaken(f"{name} lives here already: stop it first, or choose another name")
        cell = Cell(self, name, actor, parent)
        actor.ctx = Context(self, cell)
        self.cells[name] = cell
        if parent is not None:
            parent.children[name] = cell
        self.exits.pop(name, None)
        try:
            async with asyncio.timeout(self.limits.ready_timeout_s):
                await asyncio.shield(cell.started)
        except TimeoutError:
            await cell.kill()
            raise StartFailed(f"{name}: on_start took longer than {self.limits.ready_timeout_s:g} s") from None
        except asyncio.CancelledError:
            cell.task.cancel()
            raise
        except StartFailed:
            await cell.kill()  # waits for its end: the name is free again when the caller hears of it
            raise
        return cell

    async def stop_cell(self, cell: RunningActor, reason: str = "stopped") -> ActorExit:
        """Stop an actor in good order; after ``limits.stop_timeout_s`` by force."""
        cell.stop(reason)
        try:
            async with asyncio.timeout(self.limits.stop_timeout_s):
                return await asyncio.shield(cell.ended)
        except TimeoutError:
            self.count("actors_killed")
            await cell.kill()
            return cell.ended.result()

    def cell_ended(self, name: str, ended: ActorExit) -> None:
        """Free the actor's name and tell its watchers."""
        del self.cells[name]
        self.exits[name] = ended
        while len(self.exits) > self.limits.mailbox_messages:
            del self.exits[next(iter(self.exits))]
        self.deaths.actor_ended(name, TargetGone(reason=ended.gone, detail=ended.detail, permanent=ended.permanent))

    def post(
        self,
        peer: PeerId,
        endpoint: str,
        lane: Lane,
        kind: Kind,
        message: Message | None,
        *,
        source: str = "",
        target: str = "",
        request_id: int = 0,
        number: int = 0,
        number_bytes: int = 0,
        deadline_at: float | None = None,
        surely: bool = False,
    ) -> SendOutcome:
        """Send one message to another process."""
        tag = "" if message is None else tag_of(type(message))
        body = [] if message is None else encode_body(message)
        envelope = Envelope(kind=kind, source=source, target=target, target_incarnation=peer.incarnation,
                            request_id=request_id, tag=tag, number=number, number_bytes=number_bytes)  # fmt: skip
        outcome = self.links.send(peer, endpoint, lane, envelope, body, deadline_at=deadline_at, surely=surely)
        if outcome is SendOutcome.NO_LINK:
            self._note_dead(NO_LINK, peer, envelope)
        return outcome

    def _note_dead(self, reason: str, peer: PeerId, envelope: Envelope) -> None:
        """Note a lost message or answer; an envelope without a tag is a signal of the kernel, and not noted."""
        if envelope.tag:
            target = f"{envelope.target or 'an asker'}@{peer}"
            self.dead_letters.add(reason, envelope.tag, envelope.source, target, self.now())

    def note_refused(self, refusal: Refusal, tag: str, source: str, target: str) -> None:
        """Note a refused message as a dead letter, if it was refused because nobody is there for it."""
        if refusal.reason in NO_RECEIVER:
            self.dead_letters.add(refusal.reason, tag, source, f"{target}@{self.own}", self.now())

    def tell(self, owner: ActorAddress | None, address: ActorAddress, message: Message, lane: Lane) -> SendOutcome:
        if address.peer != self.own:
            source = "" if owner is None else owner.name
            return self.post(address.peer, address.endpoint, lane, Kind.TELL, message,
                              source=source, target=address.name)  # fmt: skip
        refusal = self.deliver_local(owner, address.name, message)
        if refusal is None:
            return SendOutcome.QUEUED
        self.counters[f"tells_refused.{refusal.reason}"] += 1
        return SendOutcome.FULL if refusal.reason is RefusalReason.MAILBOX_FULL else SendOutcome.NO_LINK

    async def successor(self, address: ActorAddress) -> ActorAddress:
        if address.peer == self.own or not address.endpoint:
            return address
        try:
            peer = await self.links.connect(address.endpoint)
        except TransportError as error:
            raise NotSent(f"no successor of {address}: {error}", target=address) from error
        if peer.name != address.peer.name:
            raise NotSent(f"no successor of {address}: at {address.endpoint} lives {peer}", target=address)
        return ActorAddress(address.name, peer, address.endpoint)

    def cancel(self, target: str, caller: Caller) -> None:
        """Stop working for a caller that has left. Best effort, idempotent."""
        self.streams.cancel(caller)
        if (cell := self.cells.get(target)) is not None:
            cell.cancel_question(caller)

    def admit(self, target: str, kind: type[Message], *, stream: bool) -> tuple[Cell, Handler] | Refusal:
        """Cell and handler for a message of ``kind`` to ``target``, or why it is refused now. Decodes nothing."""
        cell = self.cells.get(target)
        if cell is None:
            return Refusal(reason=RefusalReason.UNKNOWN_ACTOR, detail=f"no {target!r} at {self.own}")
        handler = cell.actor.handlers.get(kind)
        if handler is None or handler.streams != stream:
            actor = type(cell.actor).__name__
            how = "" if handler is None else "; it opens a stream" if handler.streams else "; it opens no stream"
            return Refusal(reason=RefusalReason.NO_HANDLER, detail=f"{actor} does not handle {kind.__name__}{how}")
        reason = RefusalReason.STOPPING if cell.stopping else cell.mailbox.room()
        return (cell, handler) if reason is None else Refusal(reason=reason)

    def deliver_local(
        self, sender: ActorAddress | None, target: str, message: Message, caller: Caller | None = None,
        deadline_at: float | None = None, *, window: StreamWindow | None = None,
    ) -> Refusal | None:  # fmt: skip
        """Deliver within this process; returns the refusal, if it is refused."""
        admitted = self.admit(target, type(message), stream=window is not None)
        if isinstance(admitted, Refusal):
            self.note_refused(admitted, tag_of(type(message)), "" if sender is None else sender.name, target)
            return admitted
        cell, handler = admitted
        delivery = Delivery(message, tag_of(type(message)), handler, sender, caller, deadline_at, window=window)
        cell.mailbox.put(delivery)
        return None

    def answer(self, delivery: Delivery, kind: Kind, message: Message | None, number: int = 0) -> None:
        """Answer a question, once; a tell is not answered."""
        caller = delivery.caller
        if caller is None or delivery.answered:
            return
        self.send_answer(caller, kind, message, delivery.lane, number)
        delivery.answered = True

    def send_answer(self, caller: Caller, kind: Kind, message: Message | None, lane: Lane, number: int = 0) -> None:
        """Send an answer to wherever the question came from."""
        if caller.peer == self.own:
            self.settle(caller.request_id, kind, message, number)
            return
        self.post(caller.peer, "", lane, kind, message, request_id=caller.request_id, number=number, surely=True)

    def settle(self, request_id: int, kind: Kind, message: Message | None, number: int) -> None:
        """End a question of this process: its answer has come."""
        waiter = self.requests.take(request_id)
        if waiter is None:
            self.count("late_replies")
            return
        if kind is Kind.REPLY and isinstance(message, waiter.reply_kind) and not waiter.is_stream:
            waiter.settle(message)
        elif kind is Kind.STREAM_END and isinstance(waiter, Stream):
            waiter.end(number)
        elif kind in (Kind.ERROR, Kind.REFUSED, Kind.DOWN) and isinstance(message, NoReply):
            waiter.fail(error_of(message, waiter.target, waiter.question, stream=waiter.is_stream))
        else:
            got = "nothing" if message is None else type(message).__name__
            text = f"{waiter.question} to {waiter.target}: expected {waiter.reply_kind.__name__}, got {got}"
            waiter.fail(WrongReply(text, target=waiter.target, question=waiter.question))

    def peer_gone(self, peer: PeerId, why: str, reason: Gone) -> None:
        """End all questions, watches and streams with ``peer``: the link to it is lost, or was never there."""
        self.requests.fail_peer(peer, why, reason)
        self.deaths.peer_gone(peer, reason, why)
        self.streams.cancel_peer(peer)
