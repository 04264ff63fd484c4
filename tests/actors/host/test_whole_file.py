"""A file is replaced as a whole, or stays as it was."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from actors.host.whole_file import replacing, write_once, write_whole

CRASH = """
import os, sys
from pathlib import Path
from actors.host.whole_file import replacing
with replacing(Path(sys.argv[1])) as partial:
    partial.write_text("half of the n")
    os._exit(9)
"""


def names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


def test_text_and_bytes_are_all_that_the_file_then_holds(tmp_path: Path) -> None:
    file = tmp_path / "state"
    write_whole(file, "a longer text: ü")
    assert file.read_text("utf-8") == "a longer text: ü"
    write_whole(file, b"\x00short", lasting=True)
    assert file.read_bytes() == b"\x00short" and names(tmp_path) == ["state"]


def test_a_crash_before_the_renaming_leaves_the_old_file(tmp_path: Path) -> None:
    file = tmp_path / "state"
    write_whole(file, "old")
    assert subprocess.run([sys.executable, "-c", CRASH, str(file)], check=False, timeout=60).returncode == 9
    assert file.read_text() == "old"
    write_whole(file, "new")
    assert file.read_text() == "new"


@pytest.mark.parametrize("fails", ["write_bytes", "replace"])
def test_after_an_error_the_old_file_is_there_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fails: str
) -> None:
    file = tmp_path / "state"
    write_whole(file, "old")

    def refuse(path: Path, _: object) -> None:
        path.touch()
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, fails, refuse)
    with pytest.raises(OSError, match="No space left"):
        write_whole(file, "new")
    assert file.read_text() == "old" and names(tmp_path) == ["state"]


def test_an_interruption_leaves_no_partial_file(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt), replacing(tmp_path / "state") as partial:
        partial.touch()
        raise KeyboardInterrupt
    assert names(tmp_path) == []


def test_what_is_to_last_is_flushed_before_its_renaming_and_the_name_after_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file, flushed = tmp_path / "state", list[tuple[str, bool]]()
    fsync = os.fsync

    def note(descriptor: int) -> None:
        flushed.append((Path(f"/proc/self/fd/{descriptor}").readlink().name, file.exists()))
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", note)
    write_whole(file, "not to last")
    assert flushed == []
    file.unlink()
    write_whole(file, "to last", lasting=True)
    (partial, there_before), folder = flushed
    assert partial.startswith("state.") and partial.endswith(".partial") and not there_before
    assert folder == (tmp_path.name, True)


def test_a_file_that_is_written_once_is_for_its_owner_and_never_replaced(tmp_path: Path) -> None:
    file = tmp_path / "key"
    assert write_once(file, "first") and file.stat().st_mode & 0o777 == 0o600
    assert not write_once(file, "second")
    assert file.read_text() == "first" and names(tmp_path) == ["key"]
