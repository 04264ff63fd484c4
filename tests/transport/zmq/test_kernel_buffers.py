"""A chunk goes to the kernel in one go where the system allows it; elsewhere its own tuning is left alone."""

from __future__ import annotations

import asyncio
import os
import socket
from dataclasses import replace
from pathlib import Path

import pytest

from configs.limits import DEFAULT_LIMITS
from transport.transport import Lane
from transport.zmq.context import new_context, terminate
from transport.zmq.options import lane_options, send_buffer_bytes
from transport.zmq.socket import Role, Sent, ZmqSocket

MIB = 1 << 20


def net_of(path: Path, wmem_max: str, tcp_wmem: str) -> Path:
    """A system's settings as it shows them."""
    for name, text in (("core/wmem_max", wmem_max), ("ipv4/tcp_wmem", tcp_wmem)):
        (path / name).parent.mkdir(exist_ok=True)
        (path / name).write_text(text)
    return path


@pytest.mark.parametrize(
    ("wmem_max", "tcp_wmem", "asked"),
    [
        ("4194304\n", "4096\t16384\t4194304\n", 4 * MIB),
        ("16777216\n", "4096\t16384\t8388608\n", 4 * MIB),
        ("212992\n", "4096\t16384\t4194304\n", None),  # granted would be a tenth of what tuning reaches
        ("16777216\n", "4096\t16384\t16777216\n", None),  # tuned for far networks: by itself it grows larger
        ("", "4096\t16384\t4194304\n", None),
        ("4194304\n", "4096\n", None),
    ],
)
def test_a_chunks_room_is_asked_for_only_where_it_is_granted_and_is_no_less_than_tuning_reaches(
    tmp_path: Path, wmem_max: str, tcp_wmem: str, asked: int | None
) -> None:
    assert send_buffer_bytes(4 * MIB, net_of(tmp_path, wmem_max, tcp_wmem)) == asked


def test_a_system_without_such_settings_is_left_alone(tmp_path: Path) -> None:
    assert send_buffer_bytes(4 * MIB, tmp_path) is None


def test_only_the_bulk_lane_asks() -> None:
    asked = {lane: lane_options(lane, 64, DEFAULT_LIMITS).send_buffer_bytes for lane in Lane}
    assert asked == {**dict.fromkeys(Lane), Lane.BULK: send_buffer_bytes(DEFAULT_LIMITS.bulk_chunk_bytes)}


async def test_both_ends_of_a_connection_have_the_buffer_that_was_asked_for() -> None:
    context = new_context()
    options = replace(lane_options(Lane.MESSAGE, 64, DEFAULT_LIMITS), send_buffer_bytes=96 << 10)
    arrived = asyncio.Event()
    listener = ZmqSocket(context, Role.LISTENER, options, lambda _: arrived.set())
    dialer = ZmqSocket(context, Role.DIALER, options, lambda _: None)
    try:
        endpoint = listener.bind("tcp://127.0.0.1:*")
        dialer.connect(endpoint)
        assert dialer.try_send([b"x"]) is Sent.SENT
        async with asyncio.timeout(10):
            await arrived.wait()
        assert buffers_bytes(int(endpoint.rpartition(":")[2])) == [2 * (96 << 10)] * 2
    finally:
        dialer.close(linger_s=0)
        listener.close(linger_s=0)
        assert await terminate(context, 10)


def buffers_bytes(port: int) -> list[int]:
    """The send buffers of this process's connections from or to ``port``."""
    found: list[int] = []
    for entry in Path("/proc/self/fd").iterdir():
        try:
            if not str(entry.readlink()).startswith("socket:"):
                continue
            with socket.socket(fileno=os.dup(int(entry.name))) as there:
                if there.family == socket.AF_INET and port in (there.getsockname()[1], there.getpeername()[1]):
                    found.append(there.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF))
        except OSError:  # no connection, or gone since
            continue
    return found
