"""The control server: any program that speaks ZeroMQ and MessagePack can do what ``headrace ctl`` can.

    client ── {v, id, op, args} ──▶ ROUTER ──▶ read ──▶ check (version, verb, arguments, role) ──▶ task ──▶ backend
           ◀── {v, id, ok, …} ─────────────── reply ◀────────────────────────── result | ControlError ◀──┘
           ◀── {v, id, event} … ───────────── WatchStream ◀──────────────────── backend.watch()

Invariants
- Whatever arrives is answered or counted, and never ends the server. A client's malformed frames are answered up to
  ``malformed_max``, and only counted from then on: nobody can make the server send without end.
- At most ``control_requests`` requests are under way and ``control_watches`` watches open, of one client at most
  ``control_requests_of_client`` and ``control_watches_of_client``; one more is answered ``busy``.
- Every request but ``watch`` has a deadline. A request that has been answered ``timeout`` may still take effect.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import OrderedDict
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass, fields
from typing import Any

import msgspec

from actors.control import protocol, verbs
from actors.control.backend import ControlBackend
from actors.control.errors import (
    BadArgs,
    BadConfig,
    Busy,
    ControlError,
    Internal,
    MalformedRequest,
    NotFound,
    NotNow,
    ReadOnly,
    TimedOut,
)
from actors.control.keys import READ_ONLY_USER
from actors.control.socket import ControlSocket, OpenSocket
from actors.control.verbs import RequestId
from actors.control.watches import WatchStream
from actors.core.errors import AskError
from configs.errors import ConfigError
from configs.limits import Limits
from transport.transport import SendOutcome


@dataclass
class ControlCounters:
    """Counts what the server has seen; all counts only grow."""

    requests: int = 0
    malformed: int = 0
    """Number of frames that are no request: unreadable, too large, or of another shape."""
    refused: int = 0
    """Number of requests answered with an error before the backend saw them."""
    failed: int = 0
    """Number of requests to which the backend said no, or that ran out of time."""
    internal: int = 0
    """Number of those of ``failed`` that are our bugs."""
    events: int = 0
    unanswered: int = 0
    """Number of replies for which the client's queue had no room, or whose client was gone."""

    def as_map(self) -> dict[str, int]:
        return {field.name: getattr(self, field.name) for field in fields(self)}


@dataclass(frozen=True)
class _Sender:
    """Holds where a reply goes: the client's identity, and whether its REQ socket expects an empty frame first."""

    identity: bytes
    delimited: bool
    user: str
    client: str | bytes
    """Public key of the client, the same on all its connections; without keys, the identity of its socket."""


_WatchKey = tuple[bytes, RequestId]


class ControlServer:
    """Serves ``backend`` on one ROUTER socket. Call ``start`` and ``stop`` on the same event loop."""

    def __init__(self, backend: ControlBackend, open_socket: OpenSocket, *, limits: Limits) -> None:
        self._backend = backend
        self._open_socket = open_socket
        self._limits = limits
        self._socket: ControlSocket | None = None
        self._tasks: dict[asyncio.Task[None], str | bytes] = {}
        """Requests under way, each with its client."""
        self._watches: dict[_WatchKey, tuple[WatchStream, asyncio.Task[bytes | None]]] = {}
        self._openers: dict[_WatchKey, str | bytes] = {}
        """Clients of the open watches."""
        self._malformed_of: OrderedDict[bytes, int] = OrderedDict()
        self._ticker: asyncio.TimerHandle | None = None
        self._log = logging.getLogger("headrace.control")
        self.counters = ControlCounters()

    @property
    def endpoint(self) -> str:
        """Address to which clients connect. Raises RuntimeError before ``start``."""
        if self._socket is None:
            raise RuntimeError("the control server has not been started")
        return self._socket.endpoint

    async def start(self) -> None:
        """Bind the socket. Raises OSError, if the address is in use for instance, or InsecureBind."""
        self._socket = self._open_socket(self.on_frames)
        self._tick()

    async def stop(self) -> None:
        """End open requests and streams within ``close_timeout_s``, and close the socket."""
        if self._ticker is not None:
            self._ticker.cancel()
        tasks = [*self._tasks, *(task for _, task in self._watches.values())]
        for task in tasks:
            task.cancel()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._limits.close_timeout_s):
                await asyncio.gather(*tasks, return_exceptions=True)
        if self._socket is not None:
            self._socket.close()
            self._socket = None

    def on_frames(self, frames: list[bytes], user: str = "", key: str = "") -> None:
        """Take a message from the socket: identity, an empty frame if the client is a REQ, and the request."""
        if not frames:
            self.counters.malformed += 1
            return
        delimited = len(frames) == 3 and not len(frames[1])
        sender = _Sender(bytes(frames[0]), delimited, user, key or bytes(frames[0]))
        if len(frames) != 2 and not delimited:
            error = MalformedRequest(
                f"a request is one frame, {len(frames) - 1} came", "Send the map as a single frame"
            )
            self._answer_malformed(sender, None, error)
            return
        payload = bytes(frames[-1])
        limit = self._limits.control_request_bytes
        try:
            request = protocol.read_request(payload, max_bytes=limit)
        except ControlError as error:
            self._answer_malformed(sender, protocol.request_id_of(payload, max_bytes=limit), error)
            return
        self.counters.requests += 1
        try:
            self._dispatch(sender, request, protocol.read_args(request))
        except ControlError as error:
            self.counters.refused += 1
            self._reply(sender, protocol.error_frame(request.id, error))

    def _answer_malformed(self, sender: _Sender, request_id: RequestId | None, error: ControlError) -> None:
        self.counters.malformed += 1
        count = self._malformed_of.pop(sender.identity, 0) + 1
        self._malformed_of[sender.identity] = count
        if len(self._malformed_of) > self._limits.control_peers:
            self._malformed_of.popitem(last=False)
        if count == 1:
            self._log.warning("a control client sent a malformed frame: %s", error.message)
        if count <= self._limits.malformed_max:
            self._reply(sender, protocol.error_frame(request_id, error))

    def _dispatch(self, sender: _Sender, request: protocol.Request, args: verbs.Args) -> None:
        """Start the work of a well-formed request, or raise ControlError."""
        if args.writes and sender.user == READ_ONLY_USER:
            raise ReadOnly(
                f"{request.op} changes something, and these keys may only look", "Use the control client's own keys"
            )
        key = (sender.identity, request.id)
        match args:
            case verbs.Credit():
                self._reply_result(sender, request.id, self._grant((sender.identity, args.watch), args.events))
            case verbs.Unwatch():
                self._watch_of((sender.identity, args.watch))[1].cancel()
                self._reply_result(sender, request.id, {})
            case verbs.Watch():
                if key in self._watches:
                    raise BadArgs(f"a watch with the id {request.id!r} is open", "Give every request an id of its own")
                if len(self._watches) >= self._limits.control_watches:
                    raise Busy(
                        f"{len(self._watches)} watches are open, the bound is {self._limits.control_watches}",
                        "Close one",
                    )
                of_client = sum(opener == sender.client for opener in self._openers.values())
                if of_client >= self._limits.control_watches_of_client:
                    raise Busy(f"{of_client} watches of this client are open, the bound for one client", "Close one")
                self._open_watch(sender, request.id, args)
            case _:
                if len(self._tasks) >= self._limits.control_requests:
                    raise Busy(f"{len(self._tasks)} requests are under way", "Retry later")
                of_client = sum(asker == sender.client for asker in self._tasks.values())
                if of_client >= self._limits.control_requests_of_client:
                    raise Busy(f"{of_client} requests of this client are under way, the bound for one", "Retry later")
                self._start(self._run(sender, request, args), f"control {request.op}", sender.client)

    def _start(self, work: Coroutine[Any, Any, None], name: str, client: str | bytes) -> None:
        task = asyncio.get_running_loop().create_task(work, name=name)
        self._tasks[task] = client
        task.add_done_callback(self._tasks.pop)

    async def _run(self, sender: _Sender, request: protocol.Request, args: verbs.Args) -> None:
        longest = self._limits.control_timeout_max_s
        timeout_s = min(self._limits.control_timeout_s if request.timeout_s is None else request.timeout_s, longest)
        deadline = asyncio.timeout(max(timeout_s, 0.0))
        try:
            try:
                async with deadline:
                    frame = protocol.result_frame(request.id, await self._call(request.op, args))
            except TimeoutError:
                if not deadline.expired():
                    raise
                fix = "Look with jobs or tree whether it took effect; a longer timeout_s may help"
                raise TimedOut(f"{request.op} gave no answer within {timeout_s:g} s", fix) from None
        except ControlError as error:
            self.counters.failed += 1
            frame = protocol.error_frame(request.id, error)
        except AskError as error:
            self.counters.failed += 1
            hint = "Something it needs is away; look with tree and try again"
            frame = protocol.error_frame(request.id, NotNow(f"{request.op}: {error}", hint))
        except ConfigError as error:
            self.counters.failed += 1
            frame = protocol.error_frame(request.id, BadConfig(str(error), "Mend the job file"))
        except Exception as error:  # noqa: BLE001  our bug must not end the server
            frame = protocol.error_frame(request.id, self._bug(request.op, error))
        self._reply(sender, frame)

    def _bug(self, op: str, error: Exception) -> Internal:
        self.counters.failed += 1
        self.counters.internal += 1
        self._log.error("the control op %s failed", op, exc_info=error)
        return Internal(
            f"{op} failed: {type(error).__name__}: {error}", "This is a bug; the head's log has the traceback"
        )

    async def _call(self, op: str, args: verbs.Args) -> object:
        """Answer ``ping`` and ``version`` here; for any other verb, call the backend's method of the same name."""
        match args:
            case verbs.Ping():
                return {}
            case verbs.Version():
                ops = list(verbs.VERBS)
                return {"version": protocol.VERSION, "ops": ops, "counters": self.counters.as_map()}
            case _:
                return await getattr(self._backend, op)(**msgspec.structs.asdict(args))

    def _open_watch(self, sender: _Sender, request_id: RequestId, args: verbs.Watch) -> None:
        key = (sender.identity, request_id)
        credit = min(args.credit, self._limits.control_event_queue)
        stream = WatchStream(
            request_id,
            lambda frame: self._send(sender, frame),
            credit=credit,
            queue_max=self._limits.control_event_queue,
        )
        task = asyncio.get_running_loop().create_task(self._watch(stream, args.job), name="control watch")
        self._watches[key] = (stream, task)
        self._openers[key] = sender.client
        task.add_done_callback(lambda task: self._close_watch(sender, stream, task))

    async def _watch(self, stream: WatchStream, job: str | None) -> bytes | None:
        """Feed a stream until the job ends or the client is gone; returns the error reply if it ended with one."""
        try:
            async with contextlib.aclosing(self._backend.watch(job)) as events:
                async for event in events:
                    stream.offer(event)
                    self.counters.events += 1
                    if stream.gone:
                        return None
            # the last events wait for credit; the ticker cancels this task if the client is gone
            while stream.waiting and not stream.gone:
                await stream.changed()
        except ControlError as error:
            self.counters.failed += 1
            return protocol.error_frame(stream.request_id, error)
        except Exception as error:  # noqa: BLE001  our bug must not end the server
            return protocol.error_frame(stream.request_id, self._bug("watch", error))
        return None

    def _close_watch(self, sender: _Sender, stream: WatchStream, task: asyncio.Task[bytes | None]) -> None:
        """Send the final reply, however the watch ended: by itself, by unwatch before or after it began, or by stop."""
        self._watches.pop((sender.identity, stream.request_id), None)
        self._openers.pop((sender.identity, stream.request_id), None)
        frame = None if task.cancelled() else task.result()
        result = {"events": stream.sent, "missed": stream.missed}
        if not stream.gone:
            self._reply(sender, frame or protocol.result_frame(stream.request_id, result))

    def _watch_of(self, key: _WatchKey) -> tuple[WatchStream, asyncio.Task[bytes | None]]:
        found = self._watches.get(key)
        if found is None:
            raise NotFound(f"this client has no open watch {key[1]!r}", "It may have ended; open another with watch")
        return found

    def _grant(self, key: _WatchKey, events: int) -> dict[str, int]:
        stream, _ = self._watch_of(key)
        return {"credit": stream.grant(events, credit_max=self._limits.control_event_queue)}

    def _tick(self) -> None:
        self._ticker = asyncio.get_running_loop().call_later(self._limits.control_alive_s, self._tick)
        for stream, task in list(self._watches.values()):
            stream.tick()
            if stream.gone:
                task.cancel()

    def _reply_result(self, sender: _Sender, request_id: RequestId, result: object) -> None:
        self._reply(sender, protocol.result_frame(request_id, result))

    def _reply(self, sender: _Sender, frame: bytes) -> None:
        if self._send(sender, frame) is not SendOutcome.QUEUED:
            self.counters.unanswered += 1

    def _send(self, sender: _Sender, frame: bytes) -> SendOutcome:
        if self._socket is None:
            return SendOutcome.NO_LINK
        frames: Sequence[bytes] = (sender.identity, b"", frame) if sender.delimited else (sender.identity, frame)
        return self._socket.send(frames)
