"""Listen specs, endpoints and identities: what is allowed, what is refused, and what one string leads to."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest

from configs.limits import DEFAULT_LIMITS
from transport.address import new_peer
from transport.endpoints import advertised, for_welcome, is_loopback, lane_binds, resolve_lane, split_key
from transport.errors import HandshakeRefused, InsecureBind, MalformedInput
from transport.lives import Lives


@pytest.mark.parametrize(
    "listen", ["tcp://0.0.0.0:5555", "tcp://*:*", "tcp://10.0.0.1:5555", "tcp://head:5555", "tcp://[::]:*"]
)
def test_listening_beyond_this_machine_without_keys_is_refused_and_says_what_to_do(listen: str) -> None:
    with pytest.raises(InsecureBind, match="headrace keys"):
        lane_binds(listen, secure=False)
    assert len(lane_binds(listen, secure=True)) == 3


def test_a_socket_file_in_a_directory_that_others_can_enter_is_refused(tmp_path: Path) -> None:
    shared = tmp_path / "shared"
    shared.mkdir(mode=0o755)
    shared.chmod(0o755)
    with pytest.raises(InsecureBind, match="0700"):
        lane_binds(f"ipc://{shared}/s", secure=False)
    private = tmp_path / "private"
    assert lane_binds(f"ipc://{private}/s", secure=False)[0] == f"ipc://{private}/s"
    assert stat.S_IMODE(private.stat().st_mode) == 0o700


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
        lane_binds(listen, secure=False)


def test_a_fixed_port_stands_for_three_in_a_row() -> None:
    assert lane_binds("tcp://127.0.0.1:7000", secure=False) == [f"tcp://127.0.0.1:700{n}" for n in range(3)]


def test_further_sockets_of_the_bulk_lane_lie_behind_the_three() -> None:
    assert lane_binds("tcp://127.0.0.1:7000", secure=False, sockets=5)[3:] == [
        f"tcp://127.0.0.1:700{n}" for n in (3, 4)
    ]
    with pytest.raises(ValueError, match="port 65532 and the next 4"):
        lane_binds("tcp://127.0.0.1:65532", secure=False, sockets=5)


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
