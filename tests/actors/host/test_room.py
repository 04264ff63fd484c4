"""Room is looked at before it is needed, and its lack is said in one sentence whatever library has met it."""

from __future__ import annotations

import errno
import sqlite3
from pathlib import Path

import pytest

from actors.host.room import NoSpaceLeft, free_bytes, is_short, no_space, require_room, require_size


def test_what_does_not_fit_is_refused_with_place_need_and_what_is_free(tmp_path: Path) -> None:
    require_room(tmp_path / "not" / "there" / "yet", 1, "a byte")
    with pytest.raises(NoSpaceLeft, match=r"the checkpoint of step 4 needs [\d.]+ GiB at .*where .* free: make room"):
        require_room(tmp_path, free_bytes(tmp_path) + (1 << 40), "the checkpoint of step 4")
    with pytest.raises(NoSpaceLeft, match="in all: give the machine more"):
        require_size(tmp_path / "segment", 1 << 60, "version 3 of the weights")
    assert NoSpaceLeft.permanent and not is_short(tmp_path)


@pytest.mark.parametrize(
    "error",
    [
        OSError(errno.ENOSPC, "No space left on device"),
        OSError(errno.EDQUOT, "Disk quota exceeded"),
        sqlite3.OperationalError("database or disk is full"),
        RuntimeError("Error while serializing: I/O error: No space left on device (os error 28)"),
    ],
)
def test_every_library_s_word_for_a_full_disk_is_known(tmp_path: Path, error: Exception) -> None:
    wrapped = ValueError("the model could not be saved")
    wrapped.__cause__ = error
    for each in (error, wrapped):
        full = no_space(each, tmp_path, "the checkpoint of step 4", 5 << 20)
        assert full is not None and "needs 5.0 MiB" in str(full)


def test_other_errors_are_left_as_they_are(tmp_path: Path) -> None:
    assert no_space(OSError(errno.EACCES, "Permission denied"), tmp_path, "x") is None
