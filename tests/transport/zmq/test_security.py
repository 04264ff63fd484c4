"""Keys: who is let in, who is not, and what lies on disk."""

from __future__ import annotations

import asyncio
import stat
from pathlib import Path

import pytest
import zmq

from configs.limits import DEFAULT_LIMITS
from transport.address import PeerId, new_peer
from transport.errors import HandshakeRefused, LinkTimeout
from transport.transport import DownReason, Frame, Lane
from transport.zmq.handshake import CODEC, PROTOCOL_VERSION, Confirm, Hello, Mark, control, read_head, routing_id
from transport.zmq.security import KeyFileError, NodeKeys, allow, generate_keys, load_keys, write_keys
from transport.zmq.transport import ZmqTransport


class Quiet:
    def __init__(self) -> None:
        self.ups = 0

    def on_frames(self, peer: PeerId, lane: Lane, frames: list[Frame]) -> None: ...
    def on_peer_up(self, peer: PeerId) -> None:
        self.ups += 1

    def on_peer_down(self, peer: PeerId, reason: DownReason) -> None: ...


def node(name: str, keys: NodeKeys | None) -> ZmqTransport:
    return ZmqTransport(
        new_peer(name), listen="tcp://127.0.0.1:*", unguarded=True, cluster="t", limits=DEFAULT_LIMITS, keys=keys
    )


def friends(**keys: NodeKeys) -> list[NodeKeys]:
    """Each knows all of them, by their names."""
    names = tuple((name, pair.public) for name, pair in keys.items())
    return [NodeKeys(k.public, k.secret, frozenset(key for _, key in names), names) for k in keys.values()]


async def test_nodes_that_allow_each_other_link_and_the_endpoint_alone_is_enough() -> None:
    head, worker = (
        node(name, keys) for name, keys in zip("hw", friends(h=generate_keys(), w=generate_keys()), strict=True)
    )
    await head.start(Quiet())
    await worker.start(Quiet())
    assert await worker.connect(head.endpoint, timeout_s=5) == head.peer
    assert head.peers() == [worker.peer]
    await worker.close(timeout_s=0.2)
    await head.close(timeout_s=0.2)


async def test_a_key_that_the_listener_does_not_allow_is_refused_though_it_is_a_good_key() -> None:
    head_keys, stranger_keys = generate_keys(), generate_keys()
    head = node("h", head_keys)
    stranger = node("s", NodeKeys(stranger_keys.public, stranger_keys.secret, frozenset({head_keys.public})))
    seen = Quiet()
    await head.start(seen)
    await stranger.start(Quiet())
    with pytest.raises(HandshakeRefused, match="does not allow our key"):
        await stranger.connect(head.endpoint, timeout_s=5)
    assert seen.ups == 0
    await stranger.close(timeout_s=0.2)
    await head.close(timeout_s=0.2)


async def test_a_listener_whose_key_is_not_allowed_here_is_not_even_dialed() -> None:
    head, worker = node("h", generate_keys()), node("w", generate_keys())
    await head.start(Quiet())
    await worker.start(Quiet())
    with pytest.raises(HandshakeRefused, match="not allowed here"):
        await worker.connect(head.endpoint, timeout_s=5)
    with pytest.raises(HandshakeRefused, match="names no key"):
        await worker.connect(head.endpoint.partition("?")[0], timeout_s=5)
    await worker.close(timeout_s=0.2)
    await head.close(timeout_s=0.2)


async def test_without_keys_nobody_gets_in() -> None:
    head, naked = node("h", generate_keys()), node("n", None)
    await head.start(Quiet())
    await naked.start(Quiet())
    with pytest.raises(HandshakeRefused, match="wants keys"):
        await naked.connect(head.endpoint, timeout_s=5)
    with pytest.raises((HandshakeRefused, LinkTimeout)):
        await naked.connect(head.endpoint.partition("?")[0], timeout_s=0.5)
    assert head.peers() == []
    await naked.close(timeout_s=0.2)
    await head.close(timeout_s=0.2)


def of_cluster() -> tuple[NodeKeys, NodeKeys, NodeKeys]:
    """The keys of a head, as it uses them, and of two nodes that know the head's key and each other's."""
    head, one, two = friends(boss=generate_keys(), one=generate_keys(), two=generate_keys())
    return head, one.of_head(head.public_hex), two.of_head(head.public_hex)


def test_a_name_belongs_to_a_key() -> None:
    head, one, two = of_cluster()
    for keys in (head, two):
        for name in ("one", "one.job.rollout-0", "one-7", "one-7.a.job.rollout-one-7.1"):
            assert keys.objection(name, one.public) is None
        for name in ("two", "two.job.rollout-0", "one7", "head", "machine", "head.job.trainer", "", "three"):
            assert keys.objection(name, one.public) is not None, name
    for name in ("head", "machine", "head.job.trainer"):
        assert one.objection(name, head.public) is None, "whatever the node has registered it as"
    assert one.objection("boss", head.public) is not None
    assert head.objection("anything", head.public) is None, "its own user's processes"
    pool, other = generate_keys(), generate_keys()
    both = NodeKeys(b"own", b"", frozenset(), (("gpu", pool.public), ("gpu-a", other.public)))
    assert both.objection("gpu-a", pool.public) is not None, "another key is registered as exactly that"
    assert both.objection("gpu-a-2", other.public) is None
    assert both.objection("gpu-b", pool.public) is None


@pytest.mark.parametrize("name", ["head", "machine", "two", "head.job.trainer", "two.job.rollout-0"])
async def test_a_node_that_takes_another_name_than_its_keys_is_told_and_not_linked(name: str) -> None:
    head_keys, one, _ = of_cluster()
    head, liar = node("head", head_keys), node(name, one)
    seen = Quiet()
    await head.start(seen)
    await liar.start(Quiet())
    with pytest.raises(HandshakeRefused, match=r"registered as one: start the node with --name one|name of the head"):
        await liar.connect(head.endpoint, timeout_s=5)
    assert seen.ups == 0
    await liar.close(timeout_s=0.2)
    await head.close(timeout_s=0.2)


async def test_nodes_that_know_the_head_alone_are_linked_once_it_has_named_them_to_each_other() -> None:
    """So that their workers pass weights on; each is still held to the name of its key."""
    pairs = {name: generate_keys() for name in ("head", "one", "two")}
    known = {"head": ("one", "two"), "one": ("head",), "two": ("head",)}
    keys = {
        own: NodeKeys(pair.public, pair.secret, frozenset(pairs[name].public for name in known[own]),
                      tuple((name, pairs[name].public) for name in known[own]))
        for own, pair in pairs.items()
    }  # fmt: skip
    one, two = (keys[name].of_head(pairs["head"].public_hex) for name in ("one", "two"))
    worker, stranger = node("one.j.rollout-0", one.with_neighbours(keys["head"].registered)), node("one.j.other", one)
    other = node("two.j.rollout-1", two.with_neighbours(keys["head"].registered))
    liar = node("three.j.rollout-2", two.with_neighbours(keys["head"].registered))
    for transport in (worker, stranger, other, liar):
        await transport.start(Quiet())
    with pytest.raises(HandshakeRefused, match="does not allow our key"):
        await other.connect(stranger.endpoint, timeout_s=5)
    assert await other.connect(worker.endpoint, timeout_s=5) == worker.peer
    with pytest.raises(HandshakeRefused, match="registered as two"):
        await liar.connect(worker.endpoint, timeout_s=5)
    for transport in (worker, stranger, other, liar):
        await transport.close(timeout_s=0.2)


def test_a_name_that_a_node_knows_itself_keeps_the_key_that_it_has_there() -> None:
    own, told = generate_keys(), generate_keys()
    keys = NodeKeys(b"own", b"", frozenset([own.public]), (("one", own.public),))
    keys = keys.with_neighbours((("one", told.public_hex),))
    assert keys.objection("one", own.public) is None
    assert not keys.allows(told.public)


async def test_a_listener_that_takes_another_name_than_its_keys_is_not_believed() -> None:
    """A node that is dialed says that it is the head."""
    head_keys, one, two = of_cluster()
    liar, honest, head = node("head", one), node("two", two), node("head", head_keys)
    for transport in (liar, honest, head):
        await transport.start(Quiet())
    with pytest.raises(HandshakeRefused, match="name of the head"):
        await honest.connect(liar.endpoint, timeout_s=5)
    assert await honest.connect(head.endpoint, timeout_s=5) == head.peer
    for transport in (liar, honest, head):
        await transport.close(timeout_s=0.2)


async def test_a_connection_cannot_be_slipped_into_anothers_link() -> None:
    """``two`` confirms, with its own key, on the connection that ``one`` still has to make."""
    head_keys, one, two = of_cluster()
    head = node("head", head_keys)
    await head.start(Quiet())
    honest = PeerId("one", 77)
    route = routing_id(honest, 1)
    context = zmq.Context()
    sockets: list[zmq.Socket[bytes]] = []
    loop = asyncio.get_running_loop()

    def dial(lane: int, keys: NodeKeys, frames: list[Frame]) -> zmq.Socket[bytes]:
        socket = context.socket(zmq.DEALER)
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.ROUTING_ID, route)
        socket.setsockopt(zmq.CURVE_PUBLICKEY, keys.public)
        socket.setsockopt(zmq.CURVE_SECRETKEY, keys.secret)
        socket.setsockopt(zmq.CURVE_SERVERKEY, head_keys.public)
        socket.connect(head._bound[lane])
        socket.send_multipart(frames)
        sockets.append(socket)
        return socket

    hello = Hello(PROTOCOL_VERSION, CODEC, "t", honest.name, honest.incarnation, "tcp://127.0.0.1:1", 1)
    first = dial(0, one, control(Mark.HELLO, hello))
    await loop.run_in_executor(None, first.poll, 5000)
    assert read_head(first.recv_multipart())[0] == Mark.WELCOME
    dial(1, one, control(Mark.CONFIRM, Confirm(0, 3)))
    dial(2, two, control(Mark.CONFIRM, Confirm(0, 3)))
    assert not await loop.run_in_executor(None, first.poll, 500)
    assert (head.peers(), head.counters.malformed) == ([], 1)
    for socket in sockets:
        socket.close()
    context.term()
    await head.close(timeout_s=0.2)


def test_keys_on_disk_are_private_and_come_back(tmp_path: Path) -> None:
    keys, other = generate_keys(), generate_keys()
    directory = tmp_path / "keys"
    write_keys(keys, directory)
    allow(directory, "other", other.public)
    assert stat.S_IMODE((directory / "node.secret").stat().st_mode) == 0o600
    loaded = load_keys(directory)
    assert (loaded.public, loaded.secret) == (keys.public, keys.secret)
    assert loaded.allows(other.public)
    assert loaded.allows(keys.public)
    assert not loaded.allows(generate_keys().public)


def test_an_existing_secret_is_not_overwritten_and_an_open_one_is_not_used(tmp_path: Path) -> None:
    write_keys(generate_keys(), tmp_path / "k")
    with pytest.raises(KeyFileError, match="exists"):
        write_keys(generate_keys(), tmp_path / "k")
    (tmp_path / "k" / "node.secret").chmod(0o644)
    with pytest.raises(KeyFileError, match="chmod 600"):
        load_keys(tmp_path / "k")
    with pytest.raises(KeyFileError, match="headrace keys"):
        load_keys(tmp_path / "none")


def test_a_secret_is_not_printed() -> None:
    keys = generate_keys()
    assert keys.secret.decode() not in repr(keys)
