"""The control server on a real socket, asked by our client and by plain pyzmq."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgpack
import pytest
import zmq
import zmq.asyncio

from actors.control import errors, protocol
from actors.control.client import ControlClient
from actors.control.keys import allow_read_only, load_control_keys
from actors.control.server import ControlServer
from actors.control.socket import default_endpoint, open_control_socket, read_endpoint, store_endpoint
from configs.limits import Limits
from tests.actors.control.control_fakes import FakeBackend
from transport.errors import InsecureBind
from transport.zmq.own_keys import directory_or_own
from transport.zmq.security import allow, generate_keys, write_keys

LIMITS = Limits(control_event_queue=16, malformed_max=8)


@pytest.fixture
def backend() -> FakeBackend:
    return FakeBackend()


@pytest.fixture
async def server(backend: FakeBackend, tmp_path: Path) -> AsyncIterator[ControlServer]:
    server = ControlServer(backend, open_control_socket(f"ipc://{tmp_path}/c.sock", LIMITS), limits=LIMITS)
    await server.start()
    yield server
    await server.stop()


class RawClient:
    """A DEALER of plain pyzmq, as a stranger's program would have it."""

    def __init__(self, endpoint: str, kind: int = zmq.DEALER) -> None:
        self._context = zmq.asyncio.Context()
        self._socket = self._context.socket(kind)
        self._socket.linger = 0
        self._socket.connect(endpoint)

    async def send(self, *frames: bytes) -> None:
        await self._socket.send_multipart(frames)

    async def receive(self) -> dict[str, Any]:
        async with asyncio.timeout(10):
            return msgpack.unpackb((await self._socket.recv_multipart())[-1])

    async def ask(self, **request: Any) -> dict[str, Any]:
        await self.send(msgpack.packb({"v": 1, "id": 1, **request}))
        return await self.receive()

    def close(self) -> None:
        self._context.destroy(linger=0)


@pytest.fixture
async def raw(server: ControlServer) -> AsyncIterator[RawClient]:
    client = RawClient(server.endpoint)
    yield client
    client.close()


async def test_every_verb_reaches_the_backend_and_its_result_comes_back(
    server: ControlServer, backend: FakeBackend
) -> None:
    async with ControlClient(server.endpoint, limits=LIMITS) as client:
        assert await client.call("ping") == {}
        assert (await client.call("version"))["version"] == protocol.VERSION
        assert [job["job"] for job in await client.call("jobs")] == ["demo"]
        assert await client.call("submit", {"job": {"name": "two"}}) == {"job": "two", "run_dir": "runs/two"}
        assert (await client.call("pause", {"job": "demo"}))["state"] == "paused"
        assert (await client.call("resume", {"job": "demo"}))["state"] == "running"
        assert (await client.call("scale", {"workers": 5}))["workers"] == 5
        assert (await client.call("drain", {"target": "node-1"}))["state"] == "draining"
        assert len(await client.call("metrics", {"last": 2})) == 2
        assert [row["since_s"] for row in await client.call("stalls", {"longer_than_s": 3})] == [4]
        assert await client.call("stalls", {"longer_than_s": 5.5}) == []
        assert (await client.call("dead_letters"))["counts"][0]["reason"] == "no_link"
        assert await client.call("logs", {"actor": "trainer", "lines": 1}) == ["trainer: line 0"]
        assert (await client.call("checkpoint"))["step"] == 3
        assert (await client.call("cancel", {"job": "two"}))["state"] == "cancelled"
        tree = await client.call("tree")
    assert {"name", "role", "node", "pid", "state", "incarnation", "restarts"} <= set(tree[0])
    assert backend.calls == [("submit", {"name": "two"}), ("scale", 5), ("drain", "node-1")]


async def test_a_refusal_keeps_its_type_and_its_hint(server: ControlServer) -> None:
    async with ControlClient(server.endpoint, limits=LIMITS) as client:
        await client.call("pause")
        with pytest.raises(errors.NotNow) as paused:
            await client.call("pause")
        with pytest.raises(errors.NotFound):
            await client.call("pause", {"job": "nobody"})
    assert paused.value.hint == "Use resume"


@pytest.mark.parametrize(
    ("request_", "kind", "says"),
    [
        ({"op": "pauze"}, "unknown_op", "pause"),
        ({"op": "scale", "args": {}}, "bad_args", "workers"),
        ({"op": "scale", "args": {"workers": "many"}}, "bad_args", "workers"),
        ({"op": "scale", "args": {"workers": -1}}, "bad_args", "workers"),
        ({"op": "scale", "args": {"workers": 1, "wrokers": 2}}, "bad_args", "wrokers"),
        ({"op": "jobs", "v": 2}, "version", "2"),
        ({"op": "jobs", "v": 0}, "version", "client"),
        ({"op": 5}, "malformed", "op"),
        ({"op": "jobs", "extra": 1}, "malformed", "extra"),
        ({"op": "jobs", "args": [1]}, "malformed", "args"),
        ({"op": "credit", "args": {"watch": 99}}, "not_found", "99"),
    ],
)
async def test_a_wrong_request_is_answered_with_type_message_and_hint(
    raw: RawClient, request_: dict[str, Any], kind: str, says: str
) -> None:
    reply = await raw.ask(**request_)
    assert reply["ok"] is False
    assert reply["id"] == 1
    assert reply["error"]["type"] == kind
    assert says in reply["error"]["message"] + reply["error"]["hint"]
    assert reply["error"]["hint"]


async def test_a_request_that_is_no_map_is_answered_without_an_id(raw: RawClient, server: ControlServer) -> None:
    await raw.send(b"\xc1 never valid")
    reply = await raw.receive()
    assert (reply["id"], reply["error"]["type"]) == (None, "malformed")
    await raw.send(b"a", b"b", b"c")
    assert (await raw.receive())["error"]["type"] == "malformed"
    assert server.counters.malformed == 2


async def test_a_request_beyond_the_bound_is_told_so(raw: RawClient) -> None:
    await raw.send(bytes(LIMITS.control_request_bytes + 1))
    assert (await raw.receive())["error"]["type"] == "too_large"


async def test_a_frame_far_beyond_the_bound_costs_its_sender_the_connection_and_nobody_else(
    raw: RawClient, server: ControlServer
) -> None:
    await raw.send(bytes(LIMITS.control_request_bytes * 8))
    async with ControlClient(server.endpoint, limits=LIMITS) as client:
        assert await client.call("ping") == {}


async def test_ten_thousand_random_frames_leave_the_server_serving_and_are_counted(
    raw: RawClient, server: ControlServer
) -> None:
    chance = random.Random(7)
    for n in range(10_000):
        await raw.send(_nonsense(chance))
        if n % 100 == 0:
            await asyncio.sleep(0)
    await raw.send(msgpack.packb({"v": 1, "id": "last", "op": "jobs"}))
    answered = 0
    while (reply := await raw.receive())["id"] != "last":
        answered += 1
        assert reply["ok"] is False
    assert reply["ok"] is True
    counters = server.counters
    assert counters.malformed + counters.refused == 10_000
    assert counters.malformed > 9_000
    assert answered <= LIMITS.malformed_max + counters.refused  # noise is not answered for ever
    assert counters.internal == 0


def _nonsense(chance: random.Random) -> bytes:
    """Random bytes, random maps, and requests with one thing wrong."""
    match chance.randrange(6):
        case 0 | 1 | 2:
            return chance.randbytes(chance.randrange(200))
        case 3:
            return b"\x91" * chance.randrange(1, 5000)  # nested arrays without end
        case 4:
            keys = ["v", "id", "op", "args", "timeout_s", "x", 3, None]
            values: list[object] = [None, True, -1, 1.5, "jobs", "", b"\x00", [1], {}, 2**63]
            return msgpack.packb({chance.choice(keys): chance.choice(values) for _ in range(chance.randrange(6))})
        case _:
            request: dict[object, object] = {"v": 1, "id": 1, "op": "pause", "args": {}}
            request[chance.choice(["v", "id", "args"])] = chance.choice([None, [], "x" * 200, -1.5, b"\xff"])
            return msgpack.packb(request) if chance.random() < 0.5 else msgpack.packb(request)[:-1]


async def test_a_req_socket_may_be_used(server: ControlServer) -> None:
    client = RawClient(server.endpoint, zmq.REQ)
    try:
        assert (await client.ask(op="ping"))["ok"] is True
        assert (await client.ask(op="jobs"))["result"][0]["job"] == "demo"
    finally:
        client.close()


async def test_a_request_past_its_own_deadline_is_answered_timeout(server: ControlServer) -> None:
    async with ControlClient(server.endpoint, limits=LIMITS) as client:
        with pytest.raises(errors.TimedOut, match="drain"):
            await client.call("drain", {"target": "hang"}, timeout_s=0.05)


async def test_a_bug_behind_the_socket_is_an_internal_error_and_the_server_lives_on(server: ControlServer) -> None:
    async with ControlClient(server.endpoint, limits=LIMITS) as client:
        with pytest.raises(errors.Internal, match="ZeroDivisionError"):
            await client.call("drain", {"target": "bug"})
        assert await client.call("ping") == {}
    assert server.counters.internal == 1


async def test_one_request_too_many_is_told_busy(backend: FakeBackend, tmp_path: Path) -> None:
    limits = LIMITS.model_copy(update={"control_requests": 1})
    server = ControlServer(backend, open_control_socket(f"ipc://{tmp_path}/c.sock", limits), limits=limits)
    await server.start()
    raw = RawClient(server.endpoint)
    try:
        await raw.send(msgpack.packb({"v": 1, "id": 1, "op": "drain", "args": {"target": "hang"}}))
        assert (await raw.ask(id=2, op="jobs"))["error"]["type"] == "busy"
        backend.hang.set()
        assert (await raw.receive())["ok"] is True
    finally:
        raw.close()
        await server.stop()


async def test_one_client_cannot_keep_all_others_waiting(backend: FakeBackend, tmp_path: Path) -> None:
    """A client with keys is one client, however many connections it opens."""
    directory = tmp_path / "control"
    write_keys(generate_keys(), directory)
    clients = {name: generate_keys() for name in ("greedy", "modest")}
    for name, pair in clients.items():
        allow_read_only(directory, name, pair.public) if name == "greedy" else allow(directory, name, pair.public)
    limits = LIMITS.model_copy(update={"control_requests_of_client": 4, "control_watches_of_client": 3})
    open_socket = open_control_socket("tcp://127.0.0.1:0", limits, keys=load_control_keys(directory))
    server = ControlServer(backend, open_socket, limits=limits)
    await server.start()
    backend.slow = asyncio.Event()
    connections = [ControlClient(server.endpoint, limits=limits, keys=clients["greedy"]) for _ in range(3)]
    async with contextlib.AsyncExitStack() as stack:
        for connection in connections:
            await stack.enter_async_context(connection)
        asked = [asyncio.create_task(one.call("metrics", {"last": 10_000})) for one in connections for _ in range(3)]
        done, waiting = await asyncio.wait(asked, timeout=2.0)
        assert (len(done), len(waiting)) == (5, 4)
        assert all(isinstance(task.exception(), errors.Busy) for task in done)
        async with ControlClient(server.endpoint, limits=limits, keys=clients["modest"]) as modest:
            backend.slow.set()
            assert await modest.call("metrics", {"last": 1})
        await asyncio.wait(waiting, timeout=5.0)
        watches = [asyncio.create_task(anext(one.watch())) for one in connections for _ in range(2)]
        done, open_ = await asyncio.wait(watches, timeout=1.0)
        assert (len(done), len(open_)) == (3, 3)
        assert all(isinstance(task.exception(), errors.Busy) for task in done)
        for task in open_:
            task.cancel()
        await asyncio.wait(open_, timeout=5.0)
    await server.stop()


async def test_watch_streams_events_and_ends_with_a_result(server: ControlServer, backend: FakeBackend) -> None:
    for step in range(40):  # far more than the window: the client grants credit as it goes
        backend.events.put_nowait({"kind": "step", "step": step})
    backend.events.put_nowait(None)
    async with ControlClient(server.endpoint, limits=LIMITS) as client:
        seen = [event async for event in client.watch({"job": "demo"}, window=4)]
    steps = [event["step"] for event in seen if event["kind"] == "step"]
    missed = sum(event["missed"] for event in seen if event["kind"] == "lagged")
    assert len(steps) + missed == 40
    assert steps == sorted(steps)
    assert steps[-1] == 39


async def test_a_watch_without_credit_is_told_once_how_much_it_missed(raw: RawClient, backend: FakeBackend) -> None:
    await raw.send(msgpack.packb({"v": 1, "id": "w", "op": "watch", "args": {"credit": 1}}))
    for step in range(1 + 16 + 5):  # one is paid for, sixteen are kept, five are lost
        backend.events.put_nowait({"kind": "step", "step": step})
    backend.events.put_nowait(None)
    assert (await raw.receive())["event"] == {"kind": "step", "step": 0}
    granted = await raw.ask(id="c", op="credit", args={"watch": "w", "events": 16})
    replies = [granted]
    while replies[-1].get("id") != "w" or "event" in replies[-1]:
        replies.append(await raw.receive())
    events = [reply["event"] for reply in replies if "event" in reply]
    assert events[0] == {"kind": "lagged", "missed": 5}
    assert [event["step"] for event in events[1:]] == list(range(6, 22))
    assert replies[-1] == {"v": 1, "id": "w", "ok": True, "result": {"events": 17, "missed": 5}}


async def test_unwatch_ends_the_stream_with_its_final_reply(raw: RawClient) -> None:
    await raw.send(msgpack.packb({"v": 1, "id": "w", "op": "watch"}))
    await raw.send(msgpack.packb({"v": 1, "id": "u", "op": "unwatch", "args": {"watch": "w"}}))
    replies = {reply["id"]: reply for reply in (await raw.receive(), await raw.receive())}
    assert replies["u"]["ok"] is True
    assert replies["w"]["result"] == {"events": 0, "missed": 0}


async def test_a_quiet_watch_hears_that_the_server_lives_and_a_vanished_watcher_is_forgotten(
    backend: FakeBackend, tmp_path: Path
) -> None:
    limits = LIMITS.model_copy(update={"control_alive_s": 0.05})
    server = ControlServer(backend, open_control_socket(f"ipc://{tmp_path}/c.sock", limits), limits=limits)
    await server.start()
    raw = RawClient(server.endpoint)
    try:
        await raw.send(msgpack.packb({"v": 1, "id": "w", "op": "watch"}))
        assert (await raw.receive())["event"] == {"kind": "alive"}
        raw.close()
        async with asyncio.timeout(5):
            while server._watches:
                await asyncio.sleep(0.01)
    finally:
        raw.close()
        await server.stop()


async def test_with_keys_an_operator_steers_a_reader_looks_and_a_stranger_is_kept_out(
    backend: FakeBackend, tmp_path: Path
) -> None:
    """The real thing: CURVE, the allow-list and the roles, over a TCP port."""
    directory = tmp_path / "keys"
    operator, reader, stranger = generate_keys(), generate_keys(), generate_keys()
    write_keys(generate_keys(), directory)
    allow(directory, "operator", operator.public)
    allow_read_only(directory, "reader", reader.public)
    open_socket = open_control_socket("tcp://127.0.0.1:0", LIMITS, keys=load_control_keys(directory))
    server = ControlServer(backend, open_socket, limits=LIMITS)
    await server.start()
    try:
        async with ControlClient(server.endpoint, limits=LIMITS, keys=operator) as client:
            assert (await client.call("pause"))["state"] == "paused"
        async with ControlClient(server.endpoint, limits=LIMITS, keys=reader) as client:
            assert (await client.call("jobs"))[0]["state"] == "paused"
            with pytest.raises(errors.ReadOnly, match="may only look"):
                await client.call("resume")
        async with ControlClient(server.endpoint, limits=LIMITS, keys=stranger) as client:
            with pytest.raises(errors.Unreachable):
                await client.call("jobs", timeout_s=2)
        with pytest.raises(ValueError, match="headrace keys"):
            async with ControlClient(server.endpoint, limits=LIMITS):
                pass
        assert backend.states == {"demo": "paused"}
    finally:
        await server.stop()


async def test_a_client_learns_at_once_that_nobody_listens(tmp_path: Path) -> None:
    async with ControlClient(f"ipc://{tmp_path}/nobody.sock", limits=LIMITS) as client:
        with pytest.raises(errors.Unreachable, match="no control server"):
            await client.call("ping", timeout_s=5)


async def test_a_network_endpoint_without_keys_is_refused_with_what_to_do(backend: FakeBackend) -> None:
    server = ControlServer(backend, open_control_socket("tcp://0.0.0.0:0", LIMITS), limits=LIMITS)
    with pytest.raises(InsecureBind, match="headrace keys"):
        await server.start()


async def test_on_loopback_this_users_own_keys_open_the_socket_without_being_named(
    backend: FakeBackend, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    directory = directory_or_own(None, "tcp://127.0.0.1:0", "control")
    assert directory == tmp_path / "headrace" / "control"
    keys = load_control_keys(directory)
    server = ControlServer(backend, open_control_socket("tcp://127.0.0.1:0", LIMITS, keys=keys), limits=LIMITS)
    await server.start()
    address = server.endpoint.partition("?")[0]
    assert not address.endswith(":0")
    for endpoint in (server.endpoint, address):
        async with ControlClient(endpoint, limits=LIMITS) as client:
            assert await client.call("jobs")
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "of_another_user"))
    async with ControlClient(address, limits=LIMITS) as client:
        with pytest.raises(errors.Unreachable, match="only one of server and client has keys"):
            await client.call("jobs", timeout_s=5)
    await server.stop()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can make what belongs to another user")
async def test_a_control_socket_is_not_put_where_another_user_or_everybody_can_change_it(
    backend: FakeBackend, tmp_path: Path
) -> None:
    theirs, open_to_all, linked = tmp_path / "theirs", tmp_path / "all", tmp_path / "link"
    theirs.mkdir(mode=0o700)
    os.chown(theirs, 4711, 4711)
    open_to_all.mkdir()
    open_to_all.chmod(0o777)
    linked.symlink_to(tmp_path)
    for directory in (theirs, open_to_all, linked):
        server = ControlServer(backend, open_control_socket(f"ipc://{directory}/c.sock", LIMITS), limits=LIMITS)
        with pytest.raises(InsecureBind, match="name another place"):
            await server.start()
        assert not (directory / "c.sock").exists()


def test_a_run_directory_with_a_long_path_gets_a_short_socket(tmp_path: Path) -> None:
    deep = tmp_path / ("x" * 60) / ("y" * 60)
    deep.mkdir(parents=True)
    for run_dir in (tmp_path, deep):
        endpoint = default_endpoint(run_dir, tmp_path)
        assert len(endpoint.removeprefix("ipc://")) <= 100
        store_endpoint(run_dir, endpoint)
        assert read_endpoint(str(run_dir)) == endpoint
    with pytest.raises(FileNotFoundError, match=r"control\.endpoint"):
        read_endpoint(str(tmp_path / "elsewhere"))


def test_the_verbs_and_their_roles_are_frozen() -> None:
    assert {name: kind.writes for name, kind in protocol.VERBS.items()} == {
        "ping": False, "version": False, "jobs": False, "tree": False, "nodes": False, "stalls": False,
        "dead_letters": False, "metrics": False, "logs": False,
        "watch": False, "credit": False, "unwatch": False, "submit": True, "pause": True, "resume": True,
        "cancel": True, "scale": True, "drain": True, "undrain": True, "checkpoint": True, "inject": True,
        "services": False, "queue": False, "models": False,
        "service_add": True, "service_drain": True, "service_remove": True,
    }  # fmt: skip


@pytest.mark.parametrize("seconds", [float("nan"), -1.0, -float("inf")])
async def test_seconds_that_are_none_are_the_clients_mistake(server: ControlServer, seconds: float) -> None:
    raw = RawClient(server.endpoint)
    try:
        for request in ({"op": "jobs", "timeout_s": seconds}, {"op": "stalls", "args": {"longer_than_s": seconds}}):
            error = (await raw.ask(**request))["error"]
            assert (error["type"], "expected" in error["message"] or "is" in error["message"]) == ("bad_args", True)
    finally:
        raw.close()
    assert server.counters.internal == 0


@pytest.mark.parametrize("name", ["", "..", "a/b", "a\nb", "a\x1b[2J", "x" * 129])
async def test_a_name_that_is_none_is_the_clients_mistake_and_is_answered_in_plain_characters(
    server: ControlServer, backend: FakeBackend, name: str
) -> None:
    raw = RawClient(server.endpoint)
    try:
        for op, argument in (
            ("drain", "target"),
            ("undrain", "target"),
            ("pause", "job"),
            ("logs", "actor"),
            ("service_remove", "service"),
        ):
            error = (await raw.ask(op=op, args={argument: name}))["error"]
            assert error["type"] == "bad_args" and f"{op}: {argument}" in error["message"]
            assert error["message"].isprintable()
    finally:
        raw.close()
    assert backend.calls == []
