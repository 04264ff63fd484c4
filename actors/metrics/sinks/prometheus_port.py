"""Gauges for Prometheus at http://127.0.0.1:PORT/metrics, served from a thread of the sink's own.

Invariants
- It listens on loopback only and answers GET only. A Host header that does not name this machine is refused, so that no
  foreign DNS name leads a browser here.
- A connection gets one answer, and has ``prometheus_timeout_s`` for all of it. Of more than ``prometheus_clients`` the
  oldest is closed: a scrape takes milliseconds, and idle connections keep nobody out.
"""

from __future__ import annotations

import asyncio
import math
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any, Final

from actors.metrics.sinks.sink import EvalRow, Row, SinkSetup, SinkUnavailable, evaluation_columns
from actors.protocol.metrics import ShownSample
from configs.limits import Limits
from transport.endpoints import names_loopback

_END: Final = b"\r\n\r\n"
_PATHS: Final = ("/metrics", "/")


class GaugePort:
    """Serves gauges at a port, for whoever sets them."""

    def __init__(self, port: int, limits: Limits) -> None:
        """``port``: 0: any. Raises OSError: it cannot be opened."""
        from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest

        self._registry = CollectorRegistry()
        self._gauges: dict[str, Any] = {}
        self._limits = limits
        self._loop = asyncio.new_event_loop()
        self._page = _Page(lambda: generate_latest(self._registry), CONTENT_TYPE_LATEST, limits)
        self._thread = threading.Thread(target=self._loop.run_forever, name="prometheus", daemon=True)
        self._thread.start()
        try:
            starting = asyncio.run_coroutine_threadsafe(self._page.start(port), self._loop)
            self.port: int = starting.result(limits.prometheus_timeout_s)
            """The port in use, also where 0 was asked for."""
        except OSError:
            self._end_thread()
            raise

    def set(self, name: str, text: str, value: float, **labels: str) -> None:
        """Set the gauge ``name``, of which ``text`` says what it is; a name has the same labels each time."""
        from prometheus_client import Gauge

        if name not in self._gauges:
            self._gauges[name] = Gauge(name, text, list(labels), registry=self._registry)
        gauge = self._gauges[name]
        (gauge.labels(**labels) if labels else gauge).set(value)

    def close(self) -> None:
        ending = asyncio.run_coroutine_threadsafe(self._page.stop(), self._loop)
        with suppress(TimeoutError):
            ending.result(self._limits.close_timeout_s)
        self._end_thread()

    def _end_thread(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(timeout=self._limits.close_timeout_s)
        if not self._thread.is_alive():
            self._loop.close()


class PrometheusSink:
    """Serves gauges ``headrace_<key>`` with a label ``job``, of the newest step."""

    def __init__(self, setup: SinkSetup) -> None:
        wanted, self._job = setup.config.prometheus_port or 0, setup.job
        try:
            self._gauges = GaugePort(wanted, setup.limits)
        except OSError as error:
            raise SinkUnavailable(
                f"metrics.prometheus_port: {wanted} cannot be opened ({error}); choose another"
            ) from error
        self.port = self._gauges.port

    def write(self, step: int, row: Row) -> None:
        for name, value in row.items():
            if not isinstance(value, str):
                shown = math.nan if value is None else value  # else it would keep an older step's value
                self._gauges.set(f"headrace_{name}", f"{name} of the newest step", shown, job=self._job)

    def evaluation(self, row: EvalRow) -> None:
        for name, value in evaluation_columns(row).items():
            text = f"{name} of the newest evaluation"
            self._gauges.set(f"headrace_{name.replace('/', '_')}", text, value, job=self._job)

    def samples(self, step: int, rows: Sequence[ShownSample]) -> None:
        """Leave them out: they are no gauges."""

    def observe(self, process: str, gauges: Mapping[str, float]) -> None:
        """Set gauges ``headrace_process_<name>`` with a label ``process``."""
        for name, value in gauges.items():
            text = f"{name} of a process, lately"
            self._gauges.set(f"headrace_process_{name}", text, value, job=self._job, process=process)

    def close(self) -> None:
        self._gauges.close()


class _Page:
    """Answers whoever asks for the gauges, each with the text that ``make`` gives at that moment."""

    def __init__(self, make: Callable[[], bytes], kind: str, limits: Limits) -> None:
        self._make, self._kind, self._limits = make, kind, limits
        self._server: asyncio.Server | None = None
        self._open: dict[asyncio.Task[Any], None] = {}
        """Connections, the oldest first."""

    async def start(self, port: int) -> int:
        """Listen; returns the port in use. Raises OSError: it is taken."""
        size = self._limits.console_request_bytes
        async with asyncio.timeout(self._limits.prometheus_timeout_s):
            self._server = await asyncio.start_server(self._connected, "127.0.0.1", port, limit=size)
        return int(self._server.sockets[0].getsockname()[1])

    async def stop(self) -> None:
        """Stop listening, and close all connections."""
        if self._server is not None:
            self._server.close()
        for task in list(self._open):
            task.cancel()
        async with asyncio.timeout(self._limits.close_timeout_s):
            await asyncio.gather(*self._open, return_exceptions=True)

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._open[task] = None
        if len(self._open) > self._limits.prometheus_clients:
            oldest = next(iter(self._open))
            del self._open[oldest]
            oldest.cancel()
        try:
            with suppress(OSError, TimeoutError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
                async with asyncio.timeout(self._limits.prometheus_timeout_s):
                    writer.write(self._answer((await reader.readuntil(_END)).removesuffix(_END)))
                    await writer.drain()
        except asyncio.CancelledError:
            writer.transport.abort()  # the port closes, or a newer connection wants the place
        finally:
            self._open.pop(task, None)
            writer.close()

    def _answer(self, head: bytes) -> bytes:
        first, *lines = head.decode("latin-1").split("\r\n")
        headers = {name.strip().lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
        method, _, rest = first.partition(" ")
        if not names_loopback(headers.get("host", "")):
            status, body = "421 Misdirected Request", b"ask for 127.0.0.1, on this machine\n"
        elif method != "GET":
            status, body = "405 Method Not Allowed", b"gauges can be read: use GET\n"
        elif rest.partition(" ")[0].partition("?")[0] not in _PATHS:
            status, body = "404 Not Found", b"the gauges are at /metrics\n"
        else:
            status, body = "200 OK", self._make()
        kind = self._kind if status.startswith("200") else "text/plain; charset=utf-8"
        fields = f"Content-Type: {kind}\r\nContent-Length: {len(body)}\r\nConnection: close"
        return f"HTTP/1.1 {status}\r\n{fields}\r\n\r\n".encode() + body
