"""Files that grow without end stay within a size, and a full disk fails nobody who writes to them."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from actors.host import bounded_file
from actors.host.bounded_file import BoundedFile, append, former, trim


def test_a_bounded_file_keeps_the_newest_lines_within_its_size(tmp_path: Path) -> None:
    path = tmp_path / "logs" / "machine.log"
    file = BoundedFile(path, 1000)
    for number in range(500):
        file.write(f"line {number}\n")
        assert path.stat().st_size + (former(path).stat().st_size if former(path).exists() else 0) <= 1000
    file.close()
    kept = (former(path).read_text() + path.read_text()).splitlines()
    assert kept == [f"line {number}" for number in range(500 - len(kept), 500)] and len(kept) > 40


def test_a_bounded_file_goes_on_where_it_was(tmp_path: Path) -> None:
    for life in range(3):
        file = BoundedFile(tmp_path / "f", 1 << 20)
        file.write(f"life {life}\n")
        file.close()
        file.close()
        file.write("after the end: dropped")
    assert (tmp_path / "f").read_text() == "life 0\nlife 1\nlife 2\n"


def test_what_has_no_room_is_left_out_and_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file, write = BoundedFile(tmp_path / "f", 1 << 20), os.write
    file.write("before\n")

    def full(descriptor: int, data: bytes) -> int:
        if len(data) > 3:
            return write(descriptor, data[:3])  # a part still fits
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(bounded_file.os, "write", full)
    file.write("lost")
    monkeypatch.undo()
    file.write("after\n")
    assert (tmp_path / "f").read_text() == "before\nafter\n" and file.lost == 1


def test_append_writes_all_or_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    descriptor = os.open(tmp_path / "f", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    append(descriptor, b"whole\n")
    write = os.write
    left = iter([2])

    def full(descriptor: int, data: bytes) -> int:
        if (count := next(left, 0)) == 0:
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(descriptor, data[:count])

    monkeypatch.setattr(bounded_file.os, "write", full)
    with pytest.raises(OSError, match="No space"):
        append(descriptor, b"half\n")
    os.close(descriptor)
    assert (tmp_path / "f").read_bytes() == b"whole\n"


def test_a_file_is_trimmed_even_if_its_newest_half_finds_no_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "f"
    path.write_bytes(b"x" * 5000)

    def full(self: Path, data: bytes) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", full)
    assert trim(path, 1000) and path.stat().st_size == 0 and not former(path).exists()
