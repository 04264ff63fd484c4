"""How an actor is written: a class with one coroutine per message type.

    class Counter(Actor):
        @handles(Add)
        async def add(self, message: Add) -> None: ...                  # tell, or ask that is answered Done
        @handles(GetTotal)
        async def total(self, message: GetTotal) -> Total: ...          # ask: the return value is the reply
        @handles(Watch) @concurrent
        async def values(self, message: Watch) -> AsyncIterator[Value]: # async generator: a credit stream
        @handles(Sample) @batched
        async def take(self, batch: list[Delivery]) -> None: ...        # tells that came together

Invariants
- One message at a time: while a handler awaits, the actor takes no further message, so nothing else changes its state
  meanwhile. Erlang's gen_server and Orleans' grains (unless declared reentrant) work like this too. Exceptions are
  handlers marked ``@concurrent`` and async generators, which whoever reads the handler sees.
- ``on_stop`` runs once, after ``on_start`` has succeeded, however the actor ends; a crash does not skip it.
- Handlers are found at class creation; what cannot work is refused there.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, ClassVar, TypeVar

from actors.core.context import Context
from actors.core.errors import WrongHandler
from actors.core.kernel.delivery import Delivery, Handler
from actors.core.message import Message, tag_of

__all__ = ["Actor", "Delivery", "batched", "concurrent", "handles"]

F = TypeVar("F", bound=Callable[..., Any])

_HANDLES = "__headrace_handles__"
_CONCURRENT = "__headrace_concurrent__"
_BATCHED = "__headrace_batched__"


def handles(*kinds: type[Message]) -> Callable[[F], F]:
    """Mark a coroutine method, or an async generator method, as the handler of ``kinds``."""

    def mark(function: F) -> F:
        if not (inspect.iscoroutinefunction(function) or inspect.isasyncgenfunction(function)):
            raise WrongHandler(f"{function.__qualname__}: a handler is an async method; write 'async def'")
        for kind in kinds:
            try:
                tag_of(kind)
            except KeyError:
                raise WrongHandler(f"{function.__qualname__}: {kind.__name__} has no tag; add @message(...)") from None
        setattr(function, _HANDLES, kinds)
        return function

    return mark


def concurrent(function: F) -> F:
    """Let this handler run beside others, which may change the actor's state while it awaits.

    It is cancelled when the asker gives up, dies, or reaches its deadline.
    """
    setattr(function, _CONCURRENT, True)
    return function


def batched(function: F) -> F:
    """Give the handler all waiting messages of its kind at once, in order, up to the next message of another kind.

    They come as a list of Deliveries, each a message with its sender, since ``ctx.sender`` is only that of the first. A
    question comes in a list of its own, since it needs its own answer.
    """
    setattr(function, _BATCHED, True)
    return function


class Actor:
    """Every actor derives from this class. ``self.ctx`` is set before ``on_start``."""

    ctx: Context
    handlers: ClassVar[dict[type[Message], Handler]] = {}

    def __init_subclass__(cls, **kwargs: object) -> None:
        super().__init_subclass__(**kwargs)
        table: dict[type[Message], Handler] = {}
        for base in reversed(cls.__mro__):
            own: set[type[Message]] = set()
            for name, function in vars(base).items():
                for kind in getattr(function, _HANDLES, ()):
                    if kind in own:
                        raise WrongHandler(f"{base.__qualname__}: two handlers for {kind.__name__}")
                    own.add(kind)
                    table[kind] = _handler(name, function)
        cls.handlers = table

    async def on_start(self) -> None:
        """Runs before the first message; raising here fails the start."""

    async def on_stop(self) -> None:
        """Runs after the last message, for at most ``limits.stop_timeout_s``; release what you hold."""


def _handler(name: str, function: Callable[..., Any]) -> Handler:
    concurrent, streams = bool(getattr(function, _CONCURRENT, False)), inspect.isasyncgenfunction(function)
    handler = Handler(
        method=name,
        concurrent=concurrent,
        streams=streams,
        batched=bool(getattr(function, _BATCHED, False)),
        occupies=not (concurrent or streams),
    )
    if handler.batched and not handler.occupies:
        raise WrongHandler(f"{function.__qualname__}: a batch is handled in turn; it cannot run beside others")
    return handler
