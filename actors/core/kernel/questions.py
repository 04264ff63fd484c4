"""Asking: one question, its deadline, its repeats. The table of what is open is in ``requests.py``."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import TYPE_CHECKING, Any, TypeVar, cast

from actors.core.errors import AskError, DeadlineExceeded, NotSent, SentNoReply
from actors.core.kernel.answers import Caller, error_of
from actors.core.kernel.requests import Waiter
from actors.core.message import Message, tag_of
from transport.address import ActorAddress
from transport.envelope import Kind
from transport.transport import Lane, SendOutcome

if TYPE_CHECKING:
    from actors.core.kernel.router import Router

R = TypeVar("R", bound=Message)


class Questions:
    """What ``ActorRef.ask`` does."""

    def __init__(self, router: Router) -> None:
        self._router = router

    def ask(
        self, owner: ActorAddress | None, address: ActorAddress, message: Message, reply: type[R],
        timeout_s: float | None, attempts: int, lane: Lane,
    ) -> Coroutine[Any, Any, R]:  # fmt: skip
        """See ``ActorRef.ask``."""
        if attempts == 1:  # one coroutine a question: each more is awaited anew whenever the answer comes
            return self._ask_once(owner, address, message, reply, timeout_s, lane)
        return self._ask_repeatedly(owner, address, message, reply, timeout_s, lane, attempts)

    async def _ask_repeatedly(
        self, owner: ActorAddress | None, address: ActorAddress, message: Message, reply: type[R],
        timeout_s: float | None, lane: Lane, attempts: int,
    ) -> R:  # fmt: skip
        router = self._router
        deadline_at = router.now() + (router.limits.ask_timeout_s if timeout_s is None else timeout_s)
        request_id, pause_s = router.next_id(), router.limits.backoff_first_s
        for attempt in range(attempts):
            left_s = deadline_at - router.now()
            try:
                return await self._ask_once(owner, address, message, reply, left_s, lane, request_id, attempt)
            except (NotSent, SentNoReply):
                if attempt + 1 == attempts or router.now() + pause_s >= deadline_at:
                    raise
            router.count("asks_repeated")
            await asyncio.sleep(pause_s)
            pause_s *= 2
        raise ValueError(f"attempts is {attempts}, expected at least 1")

    async def _ask_once(
        self, owner: ActorAddress | None, address: ActorAddress, message: Message, reply: type[R],
        timeout_s: float | None, lane: Lane, request_id: int = 0, attempt: int = 0,
    ) -> R:  # fmt: skip
        router = self._router
        now, asker = router.now(), "" if owner is None else owner.name
        deadline_at = now + (router.limits.ask_timeout_s if timeout_s is None else timeout_s)
        waiter = Waiter(request_id or router.next_id(), asker, address, tag_of(type(message)), reply, now)
        future = waiter.future = router.loop.create_future()
        router.requests.open(waiter)
        router.requests.arm(waiter, deadline_at)
        try:
            if address.peer == router.own:
                waiter.sent = True
                caller = Caller(router.own, waiter.request_id)
                refusal = router.deliver_local(owner, address.name, message, caller, deadline_at, attempt=attempt)
                if refusal is not None:
                    raise error_of(refusal, address, waiter.question, stream=False)
            else:
                self.send(waiter, Kind.ASK, message, lane, deadline_at, attempt=attempt)
            return cast(R, await future)  # whoever settled it has closed the waiter, and looked at the kind
        except BaseException as error:
            router.requests.close(waiter)
            if future.done() and not future.cancelled():
                future.exception()  # seen: a failure may come in the turn in which the asker is cancelled
            if not isinstance(error, AskError) or isinstance(error, DeadlineExceeded):
                self.cancel(waiter, lane)
            raise

    def send(
        self, waiter: Waiter, kind: Kind, message: Message, lane: Lane, deadline_at: float,
        *, attempt: int = 0, number: int = 0, number_bytes: int = 0,
    ) -> None:  # fmt: skip
        """Send a question to another process; raises NotSent."""
        router, address = self._router, waiter.target
        outcome = router.post(
            address.peer, address.endpoint, lane, kind, message, source=waiter.asker, target=address.name,
            request_id=waiter.request_id, attempt=attempt, number=number,
            number_bytes=number_bytes, deadline_at=deadline_at,
        )  # fmt: skip
        if outcome is not SendOutcome.QUEUED:
            why = "there is no link" if outcome is SendOutcome.NO_LINK else "its queue is full"
            text = f"{waiter.question} to {address} was not sent: {why}"
            raise NotSent(text, target=address, question=waiter.question)
        waiter.sent = not router.links.is_queueing(address.peer)

    def cancel(self, waiter: Waiter, lane: Lane) -> None:
        """Tell the target that nobody waits for this answer any more. Best effort."""
        router, address = self._router, waiter.target
        if address.peer == router.own:
            router.cancel(address.name, Caller(router.own, waiter.request_id))
        elif waiter.sent:
            router.post(address.peer, "", lane, Kind.CANCEL, None,
                       target=address.name, request_id=waiter.request_id)  # fmt: skip
