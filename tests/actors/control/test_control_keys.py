"""The control socket beyond loopback: CURVE, two roles, and silence for everybody else; on real sockets."""

from __future__ import annotations

import socket
from collections.abc import AsyncIterator
from contextlib import ExitStack, suppress
from pathlib import Path

import msgpack
import pytest
import zmq

from actors.control import errors
from actors.control.client import ControlClient
from actors.control.keys import allow_client, allow_read_only, client_names, load_control_keys, make_client
from actors.control.server import ControlServer
from actors.control.socket import check_bind, for_others, for_this_machine, open_control_socket
from configs.limits import DEFAULT_LIMITS
from tests.actors.control.control_fakes import FakeBackend
from transport.errors import InsecureBind
from transport.own_address import own_address
from transport.zmq.security import KeyFileError, NodeKeys, generate_keys, write_keys


@pytest.fixture
def operator(tmp_path: Path) -> NodeKeys:
    return make_client(tmp_path / "alice")


@pytest.fixture
def reader(tmp_path: Path) -> NodeKeys:
    return make_client(tmp_path / "bob")


@pytest.fixture
def directory(tmp_path: Path, operator: NodeKeys, reader: NodeKeys) -> Path:
    write_keys(generate_keys(), tmp_path / "control")
    allow_client(tmp_path / "control", "alice", operator.public)
    allow_read_only(tmp_path / "control", "bob", reader.public)
    return tmp_path / "control"


@pytest.fixture
def backend() -> FakeBackend:
    return FakeBackend()


@pytest.fixture
async def server(backend: FakeBackend, directory: Path) -> AsyncIterator[ControlServer]:
    keys = load_control_keys(directory)
    open_socket = open_control_socket("tcp://0.0.0.0:*", DEFAULT_LIMITS, keys=keys)  # on every interface
    server = ControlServer(backend, open_socket, limits=DEFAULT_LIMITS)
    await server.start()
    yield server
    await server.stop()


def here(server: ControlServer) -> str:
    return for_this_machine(server.endpoint)


async def test_an_operator_does_everything(server: ControlServer, backend: FakeBackend, operator: NodeKeys) -> None:
    async with ControlClient(here(server), keys=operator) as client:
        assert (await client.call("pause"))["state"] == "paused"
        assert (await client.call("scale", {"workers": 3}))["workers"] == 3
    assert backend.calls == [("scale", 3)]


async def test_a_reader_reads_and_watches_and_changes_nothing(
    server: ControlServer, backend: FakeBackend, reader: NodeKeys
) -> None:
    backend.events.put_nowait({"kind": "step", "step": 0})
    backend.events.put_nowait(None)
    async with ControlClient(here(server), keys=reader) as client:
        assert (await client.call("jobs"))[0]["job"] == "demo"
        assert [event["kind"] async for event in client.watch()] == ["step"]
        for op, args in (("pause", {}), ("cancel", {}), ("scale", {"workers": 0}), ("submit", {"job": {"name": "x"}})):
            with pytest.raises(errors.ReadOnly, match="may only look"):
                await client.call(op, args)
    assert (backend.states, backend.calls) == ({"demo": "running"}, [])


async def test_a_key_that_nobody_allowed_gets_no_answer_and_is_told_why(
    server: ControlServer, backend: FakeBackend
) -> None:
    async with ControlClient(here(server), keys=generate_keys()) as client:
        with pytest.raises(errors.Unreachable, match="does not allow this client's key"):
            await client.call("jobs", timeout_s=20)
    assert server.counters.requests == 0


async def test_a_client_without_keys_gets_no_answer(server: ControlServer) -> None:
    bare = here(server).partition("?")[0]
    async with ControlClient(bare) as client:
        with pytest.raises(errors.Unreachable, match="only one of server and client has keys"):
            await client.call("jobs", timeout_s=20)
    with pytest.raises(ValueError, match="wants keys"):
        async with ControlClient(here(server)):
            pass
    assert server.counters.requests == server.counters.malformed == 0


async def test_a_client_that_expects_another_server_sends_it_nothing(server: ControlServer, operator: NodeKeys) -> None:
    bare = here(server).partition("?")[0]
    async with ControlClient(f"{bare}?key={generate_keys().public_hex}", keys=operator) as client:
        with pytest.raises(errors.Unreachable):
            await client.call("jobs", timeout_s=1)
    assert server.counters.requests == 0


async def test_garbage_on_the_port_never_reaches_the_server(server: ControlServer, operator: NodeKeys) -> None:
    port = int(server.endpoint.partition("?")[0].rpartition(":")[2])
    request = msgpack.packb({"v": 1, "id": 1, "op": "cancel", "args": {}})  # would be obeyed elsewhere
    with ExitStack() as opened:
        for number in range(20):
            tcp = opened.enter_context(socket.create_connection(("127.0.0.1", port), timeout=5))
            tcp.sendall(b"\xff\x00\x00\x00\x00\x00\x00\x00\x01\x7f" + bytes([number]) * 500)
        context = opened.enter_context(zmq.Context())
        for _ in range(20):  # the right protocol without the mechanism
            dealer = opened.enter_context(context.socket(zmq.DEALER))
            dealer.linger = 0
            dealer.connect(f"tcp://127.0.0.1:{port}")
            with suppress(zmq.Again):  # a refused handshake takes the pipe away: a send that waits would wait for ever
                dealer.send(request, zmq.NOBLOCK)
        async with ControlClient(here(server), keys=operator) as client:
            assert (await client.call("jobs"))[0]["state"] == "running"
        assert (server.counters.requests, server.counters.malformed) == (1, 0)


@pytest.mark.parametrize(
    "endpoint",
    [
        "tcp://0.0.0.0:7000",
        "tcp://*:0",
        "tcp://10.0.0.1:7000",
        "tcp://[::]:7000",
        "tcp://box:7",
        "tcp://127.0.0.1:7000",
        "tcp://127.0.0.2:*",
        "tcp://[::1]:0",
    ],
)
def test_what_others_can_reach_is_refused_without_keys_with_what_to_do(endpoint: str, directory: Path) -> None:
    with pytest.raises(InsecureBind, match="--operator my-keys, and start with --control-keys") as found:
        check_bind(endpoint, None)
    assert endpoint in str(found.value)
    check_bind(endpoint, load_control_keys(directory))


def test_a_unix_socket_needs_no_keys() -> None:
    check_bind("ipc:///tmp/c.sock", None)


@pytest.mark.parametrize(
    "endpoint", ["7000", "tcp://127.0.0.1", "ws://0.0.0.0:80", "tcp://", "ipc://", "tcp://a b:1", ""]
)
def test_an_endpoint_of_no_form_is_told_the_form(endpoint: str, directory: Path) -> None:
    """Nothing that libzmq might understand passes for local."""
    for keys in (None, load_control_keys(directory)):
        with pytest.raises(ValueError, match=r"expected tcp://HOST:PORT or ipc:///PATH"):
            check_bind(endpoint, keys)


def test_a_wildcard_is_written_as_each_reader_can_use_it() -> None:
    key = generate_keys().public_hex
    assert for_this_machine(f"tcp://0.0.0.0:7000?key={key}") == f"tcp://127.0.0.1:7000?key={key}"
    assert for_this_machine(f"tcp://[::]:7000?key={key}") == f"tcp://[::1]:7000?key={key}"
    assert for_others(f"tcp://0.0.0.0:7000?key={key}") == f"tcp://{own_address()}:7000?key={key}"
    for endpoint in ("tcp://127.0.0.1:7000", "ipc:///run/c.sock", f"tcp://10.0.0.1:7000?key={key}"):
        assert for_this_machine(endpoint) == for_others(endpoint) == endpoint


def test_a_key_has_one_role(directory: Path, operator: NodeKeys, reader: NodeKeys) -> None:
    with pytest.raises(KeyFileError, match="may only look as long as"):
        allow_client(directory, "robert", reader.public)
    with pytest.raises(KeyFileError, match="may do everything as long as"):
        allow_read_only(directory, "al", operator.public)
    (directory / "read-only" / "bob.public").unlink()
    allow_client(directory, "bob", reader.public)
    assert client_names(directory) == (["alice", "bob"], [])


@pytest.mark.parametrize("key", [b"x" * 39, b" " * 40, b"~" * 40, b'"' * 40, b"a" * 39 + b"\n", "ä".encode() * 20])
def test_what_is_no_key_is_refused_when_it_is_allowed_and_when_it_is_read(directory: Path, key: bytes) -> None:
    with pytest.raises(KeyFileError, match="expected a key"):
        allow_read_only(directory, "carol", key)
    (directory / "read-only" / "carol.public").write_bytes(key + b"\n")
    with pytest.raises(KeyFileError, match="expected a key"):
        load_control_keys(directory)
