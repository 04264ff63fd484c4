"""A bounded queue that one actor reads.

Invariants
- Nothing is dropped silently: ``room`` is asked before ``put``, and the sender is told.
- Messages that the actor asked for itself (Down, timers) need no room: the number of watches and timers bounds them.
- First in, first out. There is no selective receive as in Erlang, where messages that nobody selects pile up.
- The future only signals; the deque stores, so a cancelled wait loses nothing.
"""

from __future__ import annotations

import asyncio
from collections import deque

from actors.core.errors import RefusalReason
from actors.core.kernel.answers import Caller
from actors.core.kernel.delivery import Delivery


class Mailbox:
    """A mailbox holds the messages that its actor has not begun.

    mailbox = Mailbox(bound=2)
    mailbox.put(a); mailbox.put(b)
    mailbox.room()                # MAILBOX_FULL: whoever delivers answers the sender with it, and puts nothing in
    mailbox.put(down)             # but a message that the actor asked for itself is put in without room
    mailbox.take()                # a
    mailbox.close()               # [b, down]: whoever closes answers the askers of these
    """

    def __init__(self, bound: int) -> None:
        self._bound = bound
        self._items: deque[Delivery] = deque()
        self._signal: asyncio.Future[None] | None = None
        self.closed = False

    def __len__(self) -> int:
        return len(self._items)

    def put(self, delivery: Delivery) -> None:
        """Append, unless the mailbox is closed."""
        if not self.closed:
            self._items.append(delivery)
            self.wake()

    def room(self) -> RefusalReason | None:
        """Why a message would be refused now; None if it would be taken."""
        if self.closed:
            return RefusalReason.STOPPING
        return RefusalReason.MAILBOX_FULL if len(self._items) >= self._bound else None

    def take(self) -> Delivery | None:
        """The next message, None if there is none."""
        return self._items.popleft() if self._items else None

    def put_back(self, delivery: Delivery) -> None:
        """Undo ``take``: the message has not been begun and is the next again."""
        self._items.appendleft(delivery)

    def take_more(self, like: Delivery, most: int) -> list[Delivery]:
        """The next messages, at most ``most``, up to the first that is not a tell for the handler of ``like``."""
        items, more = self._items, list[Delivery]()
        while items and len(more) < most and items[0].handler is like.handler and items[0].caller is None:
            more.append(items.popleft())
        return more

    def withdraw(self, caller: Caller) -> bool:
        """Remove a question that has not been begun; True if it was there."""
        for index, delivery in enumerate(self._items):
            if delivery.caller == caller:
                del self._items[index]
                return True
        return False

    def wake(self) -> None:
        """Let the reader look again."""
        if self._signal is not None and not self._signal.done():
            self._signal.set_result(None)

    async def wait(self) -> None:
        """Wait until ``wake`` is called. There is one reader, and the wait ends at the latest when it is cancelled."""
        self._signal = asyncio.get_running_loop().create_future()
        try:
            await self._signal
        finally:
            self._signal = None

    def close(self) -> list[Delivery]:
        """Take nothing more; returns what was never begun."""
        self.closed = True
        left = list(self._items)
        self._items.clear()
        return left
