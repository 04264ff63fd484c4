"""``--curve``: every socket of a benchmark is encrypted, ours and the raw ones, and both runs are in the result."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from typing import Any

import pytest
import zmq

from actors.core.errors import AskError
from benchmarks._processes import on_uvloop
from benchmarks.data_plane import _curve, ask, stream, tell, tokens, weights
from benchmarks.data_plane import all as everything
from benchmarks.data_plane._echo import ECHO, Echo, Ping, Pong, new_system

SHORT: list[Any] = [
    (ask.main, ["--count", "256"], "rtt_p50_us"),
    (tell.main, ["--count", "1024"], "per_second"),
    (stream.main, ["--items", "256", "--chunks", "8"], "chunks"),
    (tokens.main, ["--workers", "4", "--sequences", "8", "--tokens", "64"], "cpu_us_per_token"),
    (weights.main, ["--bytes", "2000000", "--rounds", "1", "--pullers", "2", "--sources", "2"], "gb_per_second_tcp"),
]


@pytest.mark.long
@pytest.mark.timeout(300)
@pytest.mark.parametrize(("main", "arguments", "figure"), SHORT, ids=lambda x: getattr(x, "__module__", None))
def test_a_benchmark_runs_plain_and_encrypted_and_says_what_encryption_costs(
    main: Callable[[list[str]], int], arguments: list[str], figure: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["--json", "--curve", *arguments]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["curve"] is True and found["of_plain"][figure]
    assert found["of_plain"] == _curve.quotients(found, found["plain"])
    assert _curve.keys() is None, "the next benchmark is plain again"
    watched = sys.modules[main.__module__].RATIOS
    assert watched and all(ratio.of(found) is not None for ratio in watched), "what is not there is not watched"


def test_with_keys_the_systems_of_a_benchmark_answer_each_other_and_nobody_without() -> None:
    async def ask_it(asker_has_keys: bool) -> Pong:
        with _curve.keys_for_all():
            asked = new_system("asked")
            asker = new_system("friend")
        if not asker_has_keys:
            asker = new_system("stranger")
        await asked.start()
        await asker.start()
        try:
            await asked.spawn(ECHO, Echo())
            return await asker.ref(asked.address(ECHO)).ask(Ping(payload=b"hello"), Pong, 5.0)
        finally:
            await asker.stop()
            await asked.stop()

    assert on_uvloop(ask_it(True)).payload == b"hello"
    with pytest.raises(AskError, match="wants keys"):
        on_uvloop(ask_it(False))


def test_raw_sockets_get_the_same_keys_and_understand_each_other_only_with_them() -> None:
    context = zmq.Context()
    with _curve.keys_for_all():
        assert os.environ[_curve._VARIABLE]
        listener, dialer = context.socket(zmq.PULL), context.socket(zmq.PUSH)
        _curve.secure_listener(listener)
        _curve.secure_dialer(dialer)
    stranger = context.socket(zmq.PUSH)
    _curve.secure_dialer(stranger)
    port = listener.bind_to_random_port("tcp://127.0.0.1")
    for socket in (stranger, dialer):
        socket.connect(f"tcp://127.0.0.1:{port}")
    assert listener.getsockopt(zmq.MECHANISM) == dialer.getsockopt(zmq.MECHANISM) == zmq.CURVE
    assert stranger.getsockopt(zmq.MECHANISM) == zmq.NULL
    stranger.send(b"plain")
    dialer.send(b"encrypted")
    assert listener.poll(5000) and listener.recv() == b"encrypted"
    assert not listener.poll(100)
    context.destroy(linger=0)


def test_quotients_are_of_measured_figures_only_wherever_they_lie() -> None:
    plain: dict[str, Any] = {"per_second": 200, "lost": 0, "ratio": 0.5, "bytes": 64, "inner": {"rtt_p50_us": 100.0}}
    found: dict[str, Any] = {"per_second": 150, "lost": 0, "ratio": 0.4, "bytes": 64, "inner": {"rtt_p50_us": 130.0}}
    assert _curve.quotients(found, plain) == {"per_second": 0.75, "inner": {"rtt_p50_us": 1.3}}


def test_bench_all_hands_curve_to_those_that_take_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fake(command: list[str], *, timeout_s: float) -> str:
        return json.dumps({"curve": "--curve" in command, "timeout_s": timeout_s})

    monkeypatch.setattr(everything, "last_line", fake)
    assert everything.main(["--json", "--curve", "--only", "tokens,delta"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found == {"tokens": {"curve": True, "timeout_s": 600.0}, "delta": {"curve": False, "timeout_s": 300.0}}
