"""Keys: who is let in, who is not, and what lies on disk."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest

from configs.limits import DEFAULT_LIMITS
from transport.address import PeerId, new_peer
from transport.errors import HandshakeRefused, LinkTimeout
from transport.transport import DownReason, Frame, Lane
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
    return ZmqTransport(new_peer(name), listen="tcp://127.0.0.1:*", cluster="t", limits=DEFAULT_LIMITS, keys=keys)


def friends(*keys: NodeKeys) -> list[NodeKeys]:
    return [NodeKeys(k.public, k.secret, frozenset(other.public for other in keys)) for k in keys]


async def test_nodes_that_allow_each_other_link_and_the_endpoint_alone_is_enough() -> None:
    head, worker = (
        node(name, keys) for name, keys in zip("hw", friends(generate_keys(), generate_keys()), strict=True)
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
