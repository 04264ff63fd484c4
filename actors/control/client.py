"""The control client that ``headrace ctl`` uses; any other program can do the same with ``docs/control_protocol.md``.

Invariants
- Every call has a deadline, and ends with its result or one ControlError.
- A watch that hears nothing, not even ``alive``, for ``SILENCE_FACTOR`` x ``control_alive_s`` ends with Unreachable.
- Values wait in queues, futures only signal: a cancelled call loses its own answer and nobody else's.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from typing import Any, Self, cast

import msgspec

from actors.control.errors import ControlError, Unreachable, error_of
from actors.control.protocol import VERSION
from actors.control.socket import ControlSocket, dial_control_socket
from configs.limits import DEFAULT_LIMITS, Limits
from transport.transport import SendOutcome
from transport.zmq.security import NodeKeys
from transport.zmq.socket import SocketEvent

SILENCE_FACTOR = 4

_WHY = {
    SocketEvent.DISCONNECTED: "it hung up",
    SocketEvent.CONNECT_FAILED: "connect failed",
    SocketEvent.HANDSHAKE_FAILED: "only one of server and client has keys, or the server's key is not the expected one",
    SocketEvent.AUTH_FAILED: "it does not allow this client's key (headrace keys, --allow or --read-only)",
}

_encode = msgspec.msgpack.Encoder().encode
_Reply = dict[str, Any]


class ControlClient:
    """A client has one connection: ``async with ControlClient(endpoint) as client: await client.call("jobs")``."""

    def __init__(self, endpoint: str, *, limits: Limits = DEFAULT_LIMITS, keys: NodeKeys | None = None) -> None:
        self._endpoint = endpoint
        self._limits = limits
        self._keys = keys
        self._socket: ControlSocket | None = None
        self._next_id = 0
        self._replies: dict[int, asyncio.Queue[_Reply]] = {}
        self._writable = asyncio.Event()
        self._broken: str = ""

    async def __aenter__(self) -> Self:
        self._socket = dial_control_socket(
            self._endpoint, self._limits, keys=self._keys, on_event=self._on_event, on_writable=self._writable.set
        )(self._on_frames)
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._socket is not None:
            self._socket.close()
            self._socket = None

    async def call(self, op: str, args: dict[str, Any] | None = None, *, timeout_s: float | None = None) -> Any:
        """The result of one request.

        Raises:
            ControlError: the server said no, gave no answer in time, or cannot be reached.
        """
        wait_s = self._limits.control_timeout_s if timeout_s is None else timeout_s
        request_id, replies = self._open()
        try:
            async with asyncio.timeout(wait_s + 1.0):  # the server's own deadline comes first, and says more
                await self._send(request_id, op, args or {}, wait_s)
                return _result(await replies.get())
        except TimeoutError:
            raise self._unreachable(wait_s) from None
        finally:
            del self._replies[request_id]

    async def watch(
        self, args: dict[str, Any] | None = None, *, window: int = 64
    ) -> AsyncGenerator[dict[str, Any], None]:
        """Yield events until the stream ends, granting credit as the caller takes them. ``alive`` is not passed on.

        Raises:
            ControlError: as ``call``; Unreachable when nothing at all was heard for too long.
        """
        request_id, replies = self._open()
        silence_s = self._limits.control_alive_s * SILENCE_FACTOR
        ended, taken = False, 0
        try:
            async with asyncio.timeout(self._limits.connect_timeout_s):
                await self._send(request_id, "watch", {**(args or {}), "credit": window}, None)
            while True:
                async with asyncio.timeout(silence_s):
                    reply = await replies.get()
                if "event" not in reply:
                    ended = True
                    _result(reply)
                    return
                kind = reply["event"].get("kind")
                if kind == "alive":
                    continue
                yield reply["event"]
                taken += kind != "lagged"
                if taken >= max(1, window // 2):
                    await self._tell("credit", {"watch": request_id, "events": taken})
                    taken = 0
        except TimeoutError:
            ended = True
            raise self._unreachable(silence_s) from None
        finally:
            del self._replies[request_id]
            if not ended:
                await self._tell("unwatch", {"watch": request_id})

    def _open(self) -> tuple[int, asyncio.Queue[_Reply]]:
        self._next_id += 1
        # a server should send no more than the credit and a few control events; the bound is against one that does
        self._replies[self._next_id] = queue = asyncio.Queue[_Reply](self._limits.control_event_queue * 2)
        return self._next_id, queue

    async def _send(self, request_id: int, op: str, args: dict[str, Any], timeout_s: float | None) -> None:
        """Send as soon as the socket is connected and has room. The caller holds the deadline."""
        request = {"v": VERSION, "id": request_id, "op": op, "args": args, "timeout_s": timeout_s}
        frame = _encode(request)
        while True:
            if self._broken:
                raise self._unreachable(0.0)
            if self._socket is None:
                raise RuntimeError("use the client in an async with block")
            self._writable.clear()
            if self._socket.send([frame]) is SendOutcome.QUEUED:
                return
            await self._writable.wait()

    async def _tell(self, op: str, args: dict[str, Any]) -> None:
        """Send a request whose answer nobody waits for; its reply is dropped as unknown."""
        if self._socket is not None and not self._broken:
            self._next_id += 1
            self._socket.send([_encode({"v": VERSION, "id": self._next_id, "op": op, "args": args})])

    def _on_frames(self, frames: list[bytes], user: str, key: str) -> None:
        try:
            reply: object = msgspec.msgpack.decode(frames[-1])
        except (msgspec.DecodeError, ValueError, RecursionError):
            return  # not from a control server; the call then ends at its deadline
        if not isinstance(reply, dict):
            return
        known = cast("_Reply", reply)
        queue = self._replies.get(cast("int", known.get("id")))
        if queue is not None and not queue.full():
            queue.put_nowait(known)

    def _on_event(self, event: SocketEvent) -> None:
        self._broken = self._broken or _WHY[event]  # keep the first: a disconnect that follows says less
        self._writable.set()
        for request_id, queue in self._replies.items():
            if not queue.full():
                error = self._unreachable(0.0)
                body = {"type": error.kind, "message": error.message, "hint": error.hint}
                queue.put_nowait({"v": VERSION, "id": request_id, "ok": False, "error": body})

    def _unreachable(self, waited_s: float) -> ControlError:
        why = self._broken or f"nothing was heard within {waited_s:g} s"
        hint = "Check the endpoint, and that the run is alive; a run stores its endpoint in RUN_DIR/control.endpoint"
        return Unreachable(f"no control server answers at {self._endpoint}: {why}", hint)


def _result(reply: _Reply) -> Any:
    if reply.get("ok"):
        return reply.get("result")
    error = cast("dict[str, str]", reply.get("error") or {})
    raise error_of(str(error.get("type")), str(error.get("message")), str(error.get("hint", "")))
