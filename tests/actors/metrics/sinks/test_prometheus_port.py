"""The port of the gauges: what it serves, to whom, and what idle or many connections cost."""

from __future__ import annotations

import socket
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from actors.metrics.sinks.prometheus_port import PrometheusSink
from actors.metrics.sinks.sink import SinkSetup, SinkUnavailable
from configs.limits import Limits
from configs.schema import MetricsConfig

PATIENCE_S = 10.0


@contextmanager
def served(tmp_path: Path, limits: Limits | None = None, port: int = 0) -> Iterator[PrometheusSink]:
    config = MetricsConfig(tensorboard=False, prometheus_port=port)
    sink = PrometheusSink(SinkSetup.of("j", tmp_path, config, limits or Limits()))
    try:
        yield sink
    finally:
        sink.close()


def page(sink: PrometheusSink, path: str = "/metrics", method: str = "GET", **headers: str) -> str:
    url = f"http://127.0.0.1:{sink.port}{path}"
    request = urllib.request.Request(url, method=method, headers=headers)
    with urllib.request.urlopen(request, timeout=PATIENCE_S) as reply:
        assert reply.headers["Content-Type"].startswith("text/plain; version=")
        return reply.read().decode()


def refusal(sink: PrometheusSink, path: str = "/metrics", method: str = "GET", **headers: str) -> int:
    with pytest.raises(urllib.error.HTTPError) as refused:
        page(sink, path, method, **headers)
    refused.value.close()
    return refused.value.code


def test_it_serves_the_newest_step_and_the_newest_evaluation(tmp_path: Path) -> None:
    with served(tmp_path) as sink:
        sink.write(3, {"step": 3, "reward_mean": 0.25, "kind": "text"})
        sink.write(4, {"step": 4, "reward_mean": 0.5})
        sink.evaluation({"version": 4, "pass_at_k": {"2": 0.75}})
        found = page(sink)
        assert 'headrace_reward_mean{job="j"} 0.5' in found and 'headrace_eval_pass_at_2{job="j"} 0.75' in found
        assert page(sink, "/") and page(sink, "/metrics?x=1")


def test_a_port_that_is_taken_is_named(tmp_path: Path) -> None:
    before = threading.active_count()
    with (
        served(tmp_path) as sink,
        pytest.raises(SinkUnavailable, match=rf"prometheus_port: {sink.port} cannot"),
        served(tmp_path, port=sink.port),
    ):
        pass
    assert threading.active_count() == before


@pytest.mark.parametrize("host", ["evil.example", "evil.example:9100", "127.0.0.1.evil.example", "10.0.0.1", ""])
def test_a_name_that_is_not_this_machine_is_refused(tmp_path: Path, host: str) -> None:
    """A page elsewhere can have its name resolve to 127.0.0.1, and would read the gauges through a browser."""
    with served(tmp_path) as sink:
        sink.write(0, {"step": 0})
        assert refusal(sink, Host=host) == 421
        assert page(sink, Host="localhost:1") and page(sink, Host="[::1]:9100")


@pytest.mark.parametrize(("path", "method", "code"), [("/x", "GET", 404), ("/metrics", "POST", 405)])
def test_it_can_be_read_and_nothing_else(tmp_path: Path, path: str, method: str, code: int) -> None:
    with served(tmp_path) as sink:
        assert refusal(sink, path, method) == code


def test_many_idle_connections_cost_no_threads_and_keep_nobody_out(tmp_path: Path) -> None:
    with served(tmp_path, Limits(prometheus_clients=4)) as sink, ExitStack() as idle:
        before = threading.active_count()
        connections = [
            idle.enter_context(socket.create_connection(("127.0.0.1", sink.port), PATIENCE_S)) for _ in range(60)
        ]
        sink.write(0, {"step": 0, "reward_mean": 0.5})
        assert 'headrace_reward_mean{job="j"} 0.5' in page(sink)
        assert threading.active_count() == before
        assert [closed(connection) for connection in connections[:50]] == [True] * 50, "the oldest make room"


def test_a_connection_that_says_nothing_or_drips_is_closed(tmp_path: Path) -> None:
    with served(tmp_path, Limits(prometheus_timeout_s=0.3)) as sink:
        began = time.monotonic()
        with (
            socket.create_connection(("127.0.0.1", sink.port), PATIENCE_S) as silent,
            socket.create_connection(("127.0.0.1", sink.port), PATIENCE_S) as dripping,
        ):
            dripping.sendall(b"GET /metrics HTTP/1.1\r\n")
            assert closed(silent) and closed(dripping)
        assert time.monotonic() - began < PATIENCE_S / 2


def test_a_head_without_an_end_is_hung_up_on(tmp_path: Path) -> None:
    with (
        served(tmp_path) as sink,
        socket.create_connection(("127.0.0.1", sink.port), PATIENCE_S) as endless,
        pytest.raises(OSError),
    ):
        while True:
            endless.sendall(b"x" * 65536)


def closed(connection: socket.socket) -> bool:
    """Whether the other side closes it, in time."""
    connection.settimeout(PATIENCE_S)
    try:
        return connection.recv(1) == b""
    except ConnectionError:
        return True
