"""Keeps what the worker says in order and in bounds while the link to the scheduler is full or down.

Invariants
- Deltas leave in the order of their sequence numbers; none overtakes one that waits.
- Beyond ``bound`` it is full, and a full outbox stops the generation: nothing is ever thrown away to make room.
"""

from __future__ import annotations

from collections import deque

from actors.core.message import Message
from actors.core.ref import ActorRef
from transport.transport import SendOutcome


class Outbox:
    """A bounded queue in front of one ref."""

    def __init__(self, target: ActorRef, bound: int) -> None:
        self.target = target
        """Who is told; the next life of the scheduler takes its predecessor's place."""
        self._bound = bound
        self._waiting: deque[Message] = deque()
        self.held_back = False
        """True while the scheduler has not confirmed that it knows us: everything waits."""

    @property
    def full(self) -> bool:
        return len(self._waiting) >= self._bound

    def __len__(self) -> int:
        return len(self._waiting)

    def send(self, message: Message) -> None:
        """Send ``message`` behind all that waits, now if possible."""
        self._waiting.append(message)
        self.flush()

    def flush(self) -> None:
        """Send what waits until the link says no."""
        while self._waiting and not self.held_back:
            if self.target.tell(self._waiting[0]) is not SendOutcome.QUEUED:
                return
            self._waiting.popleft()

    def waiting(self, kind: type[Message]) -> int:
        """How many messages of ``kind`` have not been sent."""
        return sum(isinstance(message, kind) for message in self._waiting)

    def retain(self, kind: type[Message]) -> None:
        """Forget all that waits but messages of ``kind``: nobody would read the rest."""
        self._waiting = deque(message for message in self._waiting if isinstance(message, kind))
