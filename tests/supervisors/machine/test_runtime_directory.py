"""What a killed machine process has left in the temporary directory goes with the next start, and nothing else does."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
import tempfile
from pathlib import Path

import msgspec
import psutil
import pytest

from supervisors.machine.runtime_directory import Owner, make_runtime_directory


@pytest.fixture(autouse=True)
def parent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def left_by(parent: Path, owner: Owner, name: str = "headrace-old", mode: int = 0o700) -> Path:
    directory = parent / name
    directory.mkdir(mode=mode)
    directory.chmod(mode)
    (directory / "owner.json").write_bytes(msgspec.json.encode(owner))
    (directory / "head").write_bytes(b"a socket")
    return directory


@pytest.fixture
def gone() -> Owner:
    """A process that has ended."""
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    owner = Owner(process.pid, psutil.Process(process.pid).create_time())
    process.communicate(b"\n")
    return owner


def test_a_fresh_directory_is_private_and_says_whose_it_is() -> None:
    directory = make_runtime_directory()
    assert stat.S_IMODE(directory.stat().st_mode) == 0o700
    assert not msgspec.json.decode((directory / "owner.json").read_bytes(), type=Owner).is_gone
    assert make_runtime_directory() != directory and directory.is_dir(), "its owner lives"


def test_what_a_killed_process_left_is_removed(parent: Path, gone: Owner) -> None:
    left = left_by(parent, gone)
    make_runtime_directory()
    assert not left.exists()


def test_a_number_that_somebody_else_has_by_now_is_no_owner(parent: Path) -> None:
    left = left_by(parent, Owner(os.getpid(), psutil.Process().create_time() - 3600))
    make_runtime_directory()
    assert not left.exists()


@pytest.mark.parametrize("content", [None, b"", b"{}", b"[1]", b"\xff", b'{"pid": -1, "began_s": 0}'])
def test_what_bears_no_marker_of_ours_stays(parent: Path, content: bytes | None) -> None:
    stranger = parent / "headrace-field-models"
    stranger.mkdir(mode=0o700)
    if content is not None:
        (stranger / "owner.json").write_bytes(content)
    make_runtime_directory()
    assert stranger.is_dir()


def test_what_has_another_name_or_others_can_enter_or_is_a_link_stays(parent: Path, gone: Owner) -> None:
    kept = [left_by(parent, gone, "other-old"), left_by(parent, gone, "headrace-open", mode=0o755)]
    (parent / "headrace-link").symlink_to(kept[0])
    (parent / "headrace-file").write_bytes(b"")
    make_runtime_directory()
    assert all((directory / "head").exists() for directory in kept)
    assert (parent / "headrace-link").is_symlink() and (parent / "headrace-file").exists()


def test_a_marker_that_is_a_link_is_not_followed(parent: Path, gone: Owner) -> None:
    left = left_by(parent, gone)
    (left / "owner.json").rename(parent / "elsewhere.json")
    (left / "owner.json").symlink_to(parent / "elsewhere.json")
    make_runtime_directory()
    assert left.is_dir()


def test_a_directory_that_cannot_be_listed_keeps_nobody_from_starting(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_: object) -> object:
        raise PermissionError

    monkeypatch.setattr(os, "scandir", refuse)
    assert make_runtime_directory().is_dir()
