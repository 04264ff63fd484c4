"""Listen specs, endpoints and identities: what is allowed, what is refused, and what one string leads to."""

from __future__ import annotations

import os
import socket
import stat
from pathlib import Path

import pytest

from configs.limits import DEFAULT_LIMITS
from transport.address import new_peer
from transport.endpoints import (
    advertised,
    check_socket_is_ours,
    for_welcome,
    is_loopback,
    lane_binds,
    resolve_lane,
    split_key,
)
from transport.errors import HandshakeRefused, InsecureBind, MalformedInput
from transport.lives import Lives

ROOT = Path(__file__).parents[2]


BEYOND = ["tcp://0.0.0.0:5555", "tcp://*:*", "tcp://10.0.0.1:5555", "tcp://head:5555", "tcp://[::]:*"]
LOOPBACK = ["tcp://127.0.0.1:5555", "tcp://127.0.0.1:*", "tcp://localhost:5555", "tcp://[::1]:*"]


@pytest.mark.parametrize("listen", BEYOND + LOOPBACK)
def test_listening_where_others_can_connect_is_refused_without_keys_and_says_what_to_do(listen: str) -> None:
    """Other users of this machine are others."""
    who = "other users of this machine" if listen in LOOPBACK else "other machines"
    with pytest.raises(InsecureBind, match=f"{who}.*headrace keys"):
        lane_binds(listen, secure=False)
    assert len(lane_binds(listen, secure=True)) == 3


@pytest.mark.parametrize("listen", BEYOND)
def test_what_measures_without_keys_does_so_on_loopback_only(listen: str) -> None:
    with pytest.raises(InsecureBind, match="headrace keys"):
        lane_binds(listen, secure=False, unguarded=True)
    assert len(lane_binds("tcp://127.0.0.1:*", secure=False, unguarded=True)) == 3


def test_the_product_never_listens_unguarded() -> None:
    """Only tests and benchmarks do."""
    for room in ("actors", "supervisors", "main.py"):
        found = ROOT / room
        files = [found] if found.is_file() else found.rglob("*.py")
        assert not [file for file in files if "unguarded=True" in file.read_text(encoding="utf-8")]


def test_a_socket_file_in_a_directory_that_others_can_enter_is_refused(tmp_path: Path) -> None:
    shared = tmp_path / "shared"
    shared.mkdir()
    for mode in (0o755, 0o750, 0o711, 0o1777):
        shared.chmod(mode)
        for secure in (False, True):  # keys do not guard a Unix socket
            with pytest.raises(InsecureBind, match="0700"):
                lane_binds(f"ipc://{shared}/s", secure=secure)
    private = tmp_path / "private"
    assert lane_binds(f"ipc://{private}/s", secure=False)[0] == f"ipc://{private}/s"
    assert stat.S_IMODE(private.stat().st_mode) == 0o700


def test_a_directory_that_is_a_link_is_refused(tmp_path: Path) -> None:
    (tmp_path / "private").mkdir(mode=0o700)
    (tmp_path / "link").symlink_to(tmp_path / "private")
    with pytest.raises(InsecureBind, match="no directory but a link"):
        lane_binds(f"ipc://{tmp_path}/link/s", secure=False)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can make what belongs to another user")
def test_a_directory_or_a_socket_of_another_user_is_refused(tmp_path: Path) -> None:
    theirs = tmp_path / "theirs"
    theirs.mkdir(mode=0o700)
    os.chown(theirs, 4711, 4711)
    with pytest.raises(InsecureBind, match="made by user 4711"):
        lane_binds(f"ipc://{theirs}/s", secure=False)
    with socket.socket(socket.AF_UNIX) as trap:
        trap.bind(str(tmp_path / "s"))
        check_socket_is_ours(tmp_path / "s")
        os.chown(tmp_path / "s", 4711, 4711)
        with pytest.raises(HandshakeRefused, match="user 4711 listens there"):
            check_socket_is_ours(tmp_path / "s")
    check_socket_is_ours(tmp_path / "nobody")  # who dials finds out


@pytest.mark.parametrize(
    "listen",
    [
        "",
        "5555",
        "udp://127.0.0.1:1",
        "tcp://127.0.0.1",
        "tcp://127.0.0.1:0",
        "tcp://127.0.0.1:65534",
        "ipc://" + "x" * 106,
    ],
)
def test_what_is_no_listen_spec_is_refused(listen: str) -> None:
    with pytest.raises(ValueError, match="listen"):
        lane_binds(listen, secure=True)


def test_a_fixed_port_stands_for_three_in_a_row() -> None:
    assert lane_binds("tcp://127.0.0.1:7000", secure=True) == [f"tcp://127.0.0.1:700{n}" for n in range(3)]


def test_further_sockets_of_the_bulk_lane_lie_behind_the_three() -> None:
    assert lane_binds("tcp://127.0.0.1:7000", secure=True, sockets=5)[3:] == [f"tcp://127.0.0.1:700{n}" for n in (3, 4)]
    with pytest.raises(ValueError, match="port 65532 and the next 4"):
        lane_binds("tcp://127.0.0.1:65532", secure=True, sockets=5)


def test_one_endpoint_leads_to_the_other_lanes_on_the_same_host_only() -> None:
    lanes = for_welcome(["tcp://0.0.0.0:1", "tcp://0.0.0.0:22", "tcp://[::1]:333"])
    assert lanes == ["tcp://*:1", "tcp://*:22", "tcp://*:333"]
    assert resolve_lane("tcp://head:1", lanes[1]) == "tcp://head:22"
    assert resolve_lane("ipc:///run/h/s", "ipc:///run/h/s.2") == "ipc:///run/h/s.2"
    assert resolve_lane("ipc:///run/h/s", "ipc:///run/h/s.9") == "ipc:///run/h/s.9"
    for dialed, lane in [
        ("tcp://head:1", "tcp://evil:22"),
        ("tcp://head:1", "ipc:///run/x"),
        ("tcp://head:1", "tcp://*:0"),
        ("tcp://head:1", "tcp://*:99999"),
        ("ipc:///run/h/s", "ipc:///etc/x"),
        ("ipc:///run/h/s", "ipc:///run/h/s.22"),
        ("ipc:///run/h/s", "ipc:///run/h/s.1/../x"),
        ("ipc:///run/h/s", "tcp://*:22"),
    ]:
        with pytest.raises(MalformedInput):
            resolve_lane(dialed, lane)


def test_a_wildcard_is_advertised_under_a_name_that_means_something_elsewhere() -> None:
    assert advertised("tcp://127.0.0.1:5", None) == "tcp://127.0.0.1:5"
    assert "0.0.0.0" not in advertised("tcp://0.0.0.0:5", None)
    endpoint = advertised("tcp://head:5", "ab" * 40)
    assert split_key(endpoint) == ("tcp://head:5", "ab" * 40)
    with pytest.raises(HandshakeRefused):
        split_key("tcp://head:5?key=zz")


def test_loopback_is_known_by_address_and_by_name() -> None:
    assert all(is_loopback(host) for host in ("127.0.0.1", "127.9.9.9", "localhost", "[::1]"))
    assert not any(is_loopback(host) for host in ("0.0.0.0", "10.0.0.1", "head", "*"))


def test_two_lives_of_a_name_differ_and_the_newest_rules() -> None:
    lives = Lives(DEFAULT_LIMITS)
    first, second = new_peer("w"), new_peer("w")
    assert first != second
    lives.welcome(first)
    assert not lives.is_fenced(first)
    lives.welcome(second)
    assert lives.is_fenced(first)
    assert not lives.is_fenced(second)


def test_the_memory_of_lives_is_bounded() -> None:
    lives = Lives(DEFAULT_LIMITS)
    for number in range(DEFAULT_LIMITS.names_remembered + 10):
        lives.welcome(new_peer(f"w{number}"))
    for _ in range(DEFAULT_LIMITS.lives_remembered + 10):
        lives.welcome(new_peer("same"))
    assert len(lives._known) == DEFAULT_LIMITS.names_remembered
    assert len(lives._known["same"]) == DEFAULT_LIMITS.lives_remembered
