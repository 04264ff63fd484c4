"""The life of one actor: one task, one TaskGroup, one mailbox.

    start ─▶ on_start ─▶ serve: take a message, run its handler, answer ─▶ … ─▶ end ─▶ on_stop ─▶ ActorExit
                          ├─ @concurrent handlers and streams: tasks in the group
                          └─ ctx.start_task: tasks in the group

Invariants
- Let it crash: an exception that leaves a handler (other than a ReplyError) or a task of the group ends the actor.
- Askers are told at once: for a question whose handler ran the answer is DOWN, for one in the mailbox REFUSED.
- Watchers are told last, after ``on_stop``: nothing that the actor sends comes after its Down.
- ``on_stop`` and the blocking thread have a deadline; nothing can keep an actor's name longer than that. An actor that
  swallows its cancellation is cancelled again, and left behind after ``limits.cancellations_max`` times.

The TaskGroup is what trio calls a nursery: no task outlives its actor, and an error in any task crashes the actor.
asyncio has no cancel scopes as trio has, so their check is made by hand: a CancelledError that nobody sent to this task
(``cancelling() == 0``) comes from a future that somebody else has cancelled, and is a crash, not a stop.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Coroutine
from typing import Any, cast

import structlog

from actors.core.errors import (
    CancellationSwallowed,
    HandlerCancelled,
    RefusalReason,
    ReplyError,
    StaleTerm,
    StartFailed,
)
from actors.core.kernel.answers import Caller, Refusal, TargetGone, failure_of
from actors.core.kernel.blocking import BlockingThread
from actors.core.kernel.delivery import Delivery, current
from actors.core.kernel.mailbox import Mailbox
from actors.core.kernel.port import Hosted, Port, RunningActor
from actors.core.message import Done, Message, tag_of
from actors.core.watch import ActorExit, Down
from transport.address import ActorAddress
from transport.envelope import Kind

log = structlog.get_logger("headrace.actors")


def _say(level: str, event: str, **fields: Any) -> None:
    """Log an event if possible: a log that fails (its disk is full) must not keep an actor from ending."""
    with contextlib.suppress(Exception):
        getattr(log, level)(event, **fields)


class _Stop(Exception):
    """Ends the TaskGroup in good order by cancelling its tasks; never seen outside of this file."""


class Cell:
    """Runs one actor, from its start to its exit.

    cell = Cell(port, "counter", Counter(), parent=None)     # the task begins: on_start
    await cell.started                                       # or StartFailed
    cell.mailbox.put(delivery)                               # taken when the handler before it is done
    cell.stop()                                              # after that handler: on_stop, the children, the thread
    await cell.ended                                         # ActorExit("stopped"): now the watchers are told

    a handler raises      its asker gets ERROR, askers in the mailbox REFUSED, the watchers Down(crashed)
    a child crashes       nothing, unless the parent watches it
    kill()                cancels whatever runs; the rest of the end is the same
    """

    def __init__(self, port: Port, name: str, actor: Hosted, parent: RunningActor | None) -> None:
        self._port = port
        self.limits = port.limits
        self.name = name
        self.actor = actor
        self._parent = parent
        self.address = ActorAddress(name, port.own, port.endpoint)
        self.mailbox = Mailbox(port.limits.mailbox_messages)
        self.children: dict[str, RunningActor] = {}
        self.watching: dict[ActorAddress, int] = {}
        self.timers: dict[asyncio.TimerHandle, None] = {}
        self.blocking = BlockingThread(name, self.limits.concurrent_handlers, self.limits.blocking_call_s)
        self.working: dict[Delivery, asyncio.Task[None] | None] = {}
        """Deliveries whose handlers run, with the task of each that runs beside the actor's own."""
        loop = asyncio.get_running_loop()
        self.started: asyncio.Future[None] = loop.create_future()
        self.ended: asyncio.Future[ActorExit] = loop.create_future()
        self._group: asyncio.TaskGroup | None = None
        self._stop_reason = ""
        self.task = loop.create_task(self._live(), name=f"actor {name}")

    def stop(self, reason: str = "stopped") -> None:
        self._stop_reason = self._stop_reason or reason
        self.mailbox.wake()

    @property
    def stopping(self) -> bool:
        """Whether the actor takes no further message."""
        return bool(self._stop_reason) or self.mailbox.closed

    def start_task(self, coroutine: Coroutine[Any, Any, object], name: str) -> asyncio.Task[object]:
        if self._group is None:
            coroutine.close()
            raise RuntimeError(f"{self.name} has ended: it cannot start the task {name!r}")
        return self._group.create_task(coroutine, name=f"{self.name}: {name}")

    def cancel_question(self, caller: Caller) -> None:
        if self.mailbox.withdraw(caller):
            return
        for delivery, task in self.working.items():
            if delivery.caller == caller and task is not None:
                delivery.abandoned = True
                task.cancel()

    def put_own(self, message: Message, sender: ActorAddress, watch_id: int = 0) -> None:
        """Put a message that no other actor sent into the mailbox: one from the actor's timer, or a Down."""
        handler = self.actor.handlers[type(message)]
        self.mailbox.put(Delivery(message, tag_of(type(message)), handler, sender, watch_id=watch_id))

    async def _live(self) -> None:
        error: BaseException | None = None
        reason = "stopped"
        began = False
        try:
            async with asyncio.TaskGroup() as self._group:
                await self.actor.on_start()
                began = True
                self.started.set_result(None)
                await self._serve()
                raise _Stop
        except asyncio.CancelledError:
            reason = "killed"
            cast("asyncio.Task[None]", asyncio.current_task()).uncancel()
        except BaseExceptionGroup as group:
            error = _crash_of(group)
            reason = "crashed" if error is not None else self._stop_reason
        self._group = None
        if not began:
            error = error or StartFailed(f"{self.name}: on_start was cancelled")
        self._close_mailbox(ActorExit(reason, error))
        if began:
            error = await self._run_on_stop() or error
        await self._finish(ActorExit("crashed" if error is not None else reason, error))

    async def _serve(self) -> None:
        mailbox = self.mailbox
        most = self.limits.drain_max_messages
        taken = 0
        while not self._stop_reason:
            delivery = mailbox.take()
            if delivery is None or not (delivery.handler.occupies or self._has_slot_for(delivery)):
                taken = 0
                await mailbox.wait()
                continue
            batch = [delivery]
            if delivery.handler.batched and delivery.caller is None:
                batch += mailbox.take_more(delivery, most - taken - 1)
            if self._is_due(delivery):
                delivery.since = self._port.now()
                if delivery.handler.occupies:
                    self.working[delivery] = None
                    await self._run(delivery, batch)
                else:
                    await self._run_beside(delivery, batch)
            taken += len(batch)
            if taken >= most:  # a full mailbox must not keep everybody else from the loop
                taken = 0
                await asyncio.sleep(0)

    def _has_slot_for(self, delivery: Delivery) -> bool:
        """Whether one more handler may run; else ``delivery`` goes back to the mailbox, to be withdrawn or refused."""
        if len(self.working) < self.limits.concurrent_handlers:
            return True
        self.mailbox.put_back(delivery)
        return False

    def _is_due(self, delivery: Delivery) -> bool:
        """Whether ``delivery`` is still to be handled; if its deadline has passed, the asker is told."""
        if delivery.watch_id and not self._still_watched(delivery):
            return False
        if delivery.deadline_at is not None and self._port.now() >= delivery.deadline_at:
            self._port.count("expired_before_start")
            self._port.answer(delivery, Kind.REFUSED, Refusal(reason=RefusalReason.EXPIRED))
            return False
        return True

    async def _run_beside(self, delivery: Delivery, batch: list[Delivery]) -> None:
        """Run a handler as a task of its own; returns when the next message may be taken.

        A stream that is not concurrent has a task of its own all the same: a CANCEL must be able to end it alone.
        """
        assert self._group is not None
        task = self._group.create_task(self._run(delivery, batch), name=f"{self.name}: {delivery.tag}")
        self.working[delivery] = task
        # A task that is cancelled before its first step never reaches the end of ``_run``.
        task.add_done_callback(lambda _: self._done_with(delivery))
        if not delivery.handler.concurrent:
            while delivery in self.working and not self._stop_reason:
                await self.mailbox.wait()

    def _still_watched(self, delivery: Delivery) -> bool:
        address = cast(Down, delivery.message).address
        if self.watching.get(address) != delivery.watch_id:
            return False
        del self.watching[address]
        return True

    async def _run(self, delivery: Delivery, batch: list[Delivery]) -> None:
        token = current.set(delivery)
        answer = self._port.answer
        method = getattr(self.actor, delivery.handler.method)
        try:
            if delivery.handler.streams:
                await self._port.produce(delivery, method(delivery.message))
            else:
                message = batch if delivery.handler.batched else delivery.message
                result: Message | None = await method(message)
                if delivery.caller is not None:
                    answer(delivery, Kind.REPLY, Done() if result is None else result)
        except StaleTerm as error:
            self._port.count("refused.stale_term")
            refusal = Refusal(reason=RefusalReason.STALE_TERM, detail=str(error))
            self._note_dead(delivery, refusal)
            answer(delivery, Kind.REFUSED, refusal)
        except ReplyError as error:
            if delivery.caller is None:
                why = str(error)
                _say("warning", "a tell was answered with an error", actor=self.name, tag=delivery.tag, error=why)
            answer(delivery, Kind.ERROR, failure_of(error, declared=True))
        except asyncio.CancelledError as error:
            if cast("asyncio.Task[None]", asyncio.current_task()).cancelling() > 0:
                raise
            escaped = HandlerCancelled(f"{delivery.tag}: the handler awaited something that somebody else cancelled")
            answer(delivery, Kind.ERROR, failure_of(escaped, declared=False))
            raise escaped from error
        except Exception as error:
            answer(delivery, Kind.ERROR, failure_of(error, declared=False))
            raise
        finally:
            current.reset(token)
            if delivery.handler.occupies:
                self._done_with(delivery)

    def _note_dead(self, delivery: Delivery, refusal: Refusal) -> None:
        if delivery.watch_id or delivery.sender == self.address:
            return  # a Down, or a message to itself: nobody else has sent it
        self._port.note_refused(refusal, delivery.tag, str(delivery.sender or ""), self.name)

    def _done_with(self, delivery: Delivery) -> None:
        if delivery.answered or delivery.abandoned or delivery.caller is None:
            self.working.pop(delivery, None)
        # Else its handler is cancelled because the actor ends: ``_close_mailbox`` will answer it with the exit.
        self.mailbox.wake()

    def _close_mailbox(self, ended: ActorExit) -> None:
        if not self.started.done():
            failed = StartFailed(f"{self.name} did not start: {ended.error!r}")
            failed.__cause__ = ended.error
            self.started.set_exception(failed)
            self.started.exception()  # marked as retrieved: spawn may have given up waiting
        gone = TargetGone(reason=ended.gone, detail=ended.detail, permanent=ended.permanent)
        for delivery in self.working:
            self._port.answer(delivery, Kind.DOWN, gone)
        self.working.clear()
        refusal = Refusal(reason=RefusalReason.STOPPING, detail=ended.reason)
        for delivery in self.mailbox.close():
            self._note_dead(delivery, refusal)
            self._port.answer(delivery, Kind.REFUSED, refusal)
        for timer in self.timers:
            timer.cancel()
        self.timers.clear()

    async def _run_on_stop(self) -> BaseException | None:
        try:
            async with asyncio.timeout(self.limits.stop_timeout_s):
                await self.actor.on_stop()
        except (Exception, asyncio.CancelledError) as error:  # noqa: BLE001 - any actor's code; its exit reports it
            _say("error", "on_stop failed", actor=self.name, error=repr(error))
            return error
        return None

    async def _finish(self, ended: ActorExit) -> None:
        if ended.error is not None:
            _say("error", "an actor crashed", actor=self.name, error=repr(ended.error), exc_info=ended.error)
        try:
            await self._end_what_is_its_own(ended)
        finally:  # whatever fails above, those who wait for the end must not wait for ever
            if not self.ended.done():
                self._tell_end(ended)

    async def _end_what_is_its_own(self, ended: ActorExit) -> None:
        for child in reversed(list(self.children.values())):
            await self._port.stop_cell(child, ended.reason)
        if not await self.blocking.close(self.limits.stop_timeout_s):
            self._port.count("threads_left_behind")
            left = self.blocking.running
            _say("error", "a blocking call did not end; its thread is left behind", actor=self.name, function=left)

    def _tell_end(self, ended: ActorExit) -> None:
        for address in list(self.watching):
            self._port.unwatch(self, address)
        if self._parent is not None:
            self._parent.children.pop(self.name, None)
        self._port.cell_ended(self.name, ended)
        self.ended.set_result(ended)

    async def kill(self) -> None:
        """Cancel whatever the actor does, and wait until it has ended."""
        cancellations = 0
        while not self.ended.done():
            if not self.mailbox.closed:  # else it is ending already, and each step of that has a deadline
                if cancellations >= self.limits.cancellations_max:
                    self._leave_behind()
                    return
                self.task.cancel()
                cancellations += 1
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self.limits.stop_timeout_s):
                    await asyncio.shield(self.ended)

    def _leave_behind(self) -> None:
        """Give up on a task that ignores its cancellation: to everybody else the actor has ended."""
        self._port.count("actors_left_behind")
        ended = ActorExit("crashed", CancellationSwallowed(f"{self.name} goes on although it was cancelled"))
        _say("error", "an actor swallows its cancellation and is left behind", actor=self.name)
        self._close_mailbox(ended)
        self._tell_end(ended)


def _crash_of(group: BaseExceptionGroup[BaseException]) -> BaseException | None:
    """The first error of a group, None if it holds nothing but ``_Stop``."""
    for error in group.exceptions:
        if isinstance(error, BaseExceptionGroup):
            nested = _crash_of(cast("BaseExceptionGroup[BaseException]", error))
            if nested is not None:
                return nested
        elif not isinstance(error, _Stop):
            return error
    return None
