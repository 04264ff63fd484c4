"""Where ranks meet on one machine: private, and nothing of it stays."""

from __future__ import annotations

import signal
import stat
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from actors.ranks.meeting_place import make_meeting_place, remove_meeting_place

_MAKE_ONE = """
import sys, tempfile, time
tempfile.tempdir = sys.argv[1]
from actors.ranks.meeting_place import make_meeting_place
print(make_meeting_place(), flush=True)
time.sleep(60)
"""


@pytest.fixture(autouse=True)
def temporary_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def test_what_killed_ranks_have_left_is_removed_by_the_next_leader_and_what_others_use_is_not(
    temporary_files: Path,
) -> None:
    with subprocess.Popen([sys.executable, "-c", _MAKE_ONE, str(temporary_files)], stdout=subprocess.PIPE) as other:
        assert other.stdout is not None
        theirs = Path(other.stdout.readline().decode().strip())
        (theirs / "store").write_bytes(b"1")
        ours = make_meeting_place()
        assert sorted(temporary_files.iterdir()) == sorted([ours, theirs])
        other.send_signal(signal.SIGKILL)
    second = make_meeting_place()
    assert sorted(temporary_files.iterdir()) == sorted([ours, second])
    for place in (ours, second, second):
        remove_meeting_place(place)
    assert not [*temporary_files.iterdir()]


def test_nobody_else_may_enter_and_a_link_in_its_place_is_left_alone(temporary_files: Path, tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (temporary_files / "headrace-ranks-link").symlink_to(elsewhere)
    place = make_meeting_place()
    assert stat.S_IMODE(place.stat().st_mode) == 0o700 and elsewhere.is_dir()
    remove_meeting_place(place)
