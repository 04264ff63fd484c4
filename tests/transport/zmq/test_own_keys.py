"""This user's own pair: made once, private, and used on loopback only."""

from __future__ import annotations

import os
import stat
import threading
from pathlib import Path

import pytest

from transport.zmq.own_keys import directory_or_own, own_keys_directory, own_keys_for
from transport.zmq.security import KeyFileError, generate_keys, load_keys


@pytest.fixture(autouse=True)
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    return tmp_path


def test_it_is_made_for_tcp_on_loopback_and_for_nothing_else(state: Path) -> None:
    for endpoint in ("", "foo", "ipc:///run/x", "tcp://0.0.0.0:1", "tcp://10.0.0.1:7001", "memory://head"):
        assert directory_or_own(None, endpoint, "nodes") is None
    assert directory_or_own(Path("mine"), "tcp://127.0.0.1:*", "nodes") == Path("mine")
    assert not (state / "headrace").exists()
    for endpoint in ("tcp://127.0.0.1:*", "tcp://localhost:7001", "tcp://[::1]:7001", "tcp://127.0.0.1:7?key=ab"):
        assert directory_or_own(None, endpoint, "nodes") == state / "headrace" / "nodes"
    assert load_keys(state / "headrace" / "nodes").allowed == frozenset()
    for path, mode in (("", 0o700), ("nodes", 0o700), ("nodes/node.secret", 0o600)):
        assert stat.S_IMODE((state / "headrace" / path).stat().st_mode) == mode


def test_processes_that_begin_at_the_same_time_have_the_same_pair() -> None:
    begin, made = threading.Barrier(8), list[bytes]()

    def make() -> None:
        begin.wait(10)
        directory = directory_or_own(None, "tcp://127.0.0.1:*", "nodes")
        assert directory is not None
        made.append(load_keys(directory).public)

    threads = [threading.Thread(target=make) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
    assert (len(made), len(set(made))) == (8, 1)
    assert [path.name for path in own_keys_directory("nodes").parent.iterdir()] == ["nodes"]


def test_who_dials_uses_it_if_the_listener_has_it(state: Path) -> None:
    assert own_keys_for("tcp://127.0.0.1:7000", None, "control") is None
    directory_or_own(None, "tcp://127.0.0.1:*", "control")
    own = load_keys(state / "headrace" / "control")
    for key in (None, own.public_hex):
        found = own_keys_for("tcp://127.0.0.1:7000", key, "control")
        assert found is not None
        assert found.public == own.public
    assert own_keys_for("tcp://127.0.0.1:7000", generate_keys().public_hex, "control") is None
    assert own_keys_for("tcp://box:7000", None, "control") is None


def test_a_home_that_cannot_be_written_is_told_with_what_to_do(state: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (state / "file").touch()
    monkeypatch.setenv("XDG_STATE_HOME", str(state / "file"))
    with pytest.raises(KeyFileError, match="XDG_STATE_HOME, or make keys with `headrace keys`"):
        directory_or_own(None, "tcp://127.0.0.1:*", "nodes")


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can make what belongs to another user")
def test_a_pair_that_another_user_has_put_there_is_refused(state: Path) -> None:
    directory = directory_or_own(None, "tcp://127.0.0.1:*", "nodes")
    assert directory is not None
    os.chown(directory / "node.secret", 4711, 4711)
    with pytest.raises(KeyFileError, match="belongs to user 4711"):
        load_keys(directory)
