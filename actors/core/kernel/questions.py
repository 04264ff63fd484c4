"""Asking: one question and its deadline. The table of what is open is in ``requests.py``."""

from __future__ import annotations

from typing import TypeVar, cast

from actors.core.errors import AskError, DeadlineExceeded, NotSent
from actors.core.kernel.answers import Caller, error_of
from actors.core.kernel.port import Port
from actors.core.kernel.requests import Waiter
from actors.core.message import Message, tag_of
from transport.address import ActorAddress
from transport.envelope import Kind
from transport.transport import Lane, SendOutcome

R = TypeVar("R", bound=Message)


class Questions:
    """``Questions`` does the work of ``ActorRef.ask``."""

    def __init__(self, port: Port) -> None:
        self._port = port

    async def ask(
        self, owner: ActorAddress | None, address: ActorAddress, message: Message, reply: type[R],
        timeout_s: float | None, lane: Lane,
    ) -> R:  # fmt: skip
        """See ``ActorRef.ask``. All of it is one coroutine: each further one would be resumed with every answer."""
        port = self._port
        now, asker = port.now(), "" if owner is None else owner.name
        deadline_at = now + (port.limits.ask_timeout_s if timeout_s is None else timeout_s)
        waiter = Waiter(port.next_id(), asker, address, tag_of(type(message)), reply, now)
        future = waiter.future = port.loop.create_future()
        port.requests.open(waiter)
        port.requests.arm(waiter, deadline_at)
        try:
            if address.peer == port.own:
                waiter.sent = True
                caller = Caller(port.own, waiter.request_id)
                refusal = port.deliver_local(owner, address.name, message, caller, deadline_at)
                if refusal is not None:
                    raise error_of(refusal, address, waiter.question, stream=False)
            else:
                self.send(waiter, Kind.ASK, message, lane, deadline_at)
            return cast(R, await future)  # whoever settled it has closed the waiter, and checked the reply's type
        except BaseException as error:
            port.requests.close(waiter)
            if future.done() and not future.cancelled():
                future.exception()  # else asyncio logs one that comes just as the asker is cancelled as never retrieved
            if not isinstance(error, AskError) or isinstance(error, DeadlineExceeded):
                self.cancel(waiter, lane)
            raise

    def send(
        self, waiter: Waiter, kind: Kind, message: Message, lane: Lane, deadline_at: float,
        *, number: int = 0, number_bytes: int = 0,
    ) -> None:  # fmt: skip
        """Send a question to another process; raises NotSent."""
        port, address = self._port, waiter.target
        outcome = port.post(
            address.peer, address.endpoint, lane, kind, message, source=waiter.asker, target=address.name,
            request_id=waiter.request_id, number=number, number_bytes=number_bytes, deadline_at=deadline_at,
        )  # fmt: skip
        if outcome is not SendOutcome.QUEUED:
            why = "there is no link" if outcome is SendOutcome.NO_LINK else "its queue is full"
            text = f"{waiter.question} to {address} was not sent: {why}"
            raise NotSent(text, target=address, question=waiter.question)
        waiter.sent = not port.links.is_queueing(address.peer)

    def cancel(self, waiter: Waiter, lane: Lane) -> None:
        """Tell the target that nobody waits for this answer any more. Best effort."""
        port, address = self._port, waiter.target
        if address.peer == port.own:
            port.cancel(address.name, Caller(port.own, waiter.request_id))
        elif waiter.sent:
            port.post(address.peer, "", lane, Kind.CANCEL, None,
                       target=address.name, request_id=waiter.request_id)  # fmt: skip
