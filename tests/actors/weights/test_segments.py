"""Where a run's shared memory lies: nobody else can know, enter or prepare it, and what was left is found again."""

from __future__ import annotations

import os
import stat
import threading
from pathlib import Path

import pytest

from actors.weights import segments
from actors.weights.memory import SegmentWriter, map_segment, partial_path
from actors.weights.segments import (
    SIMULATED_HOST,
    Host,
    bytes_in_memory,
    held_path,
    keep_run_id,
    known_run_id,
    open_ours,
    path_id,
    remove_held_by,
    remove_segments,
    run_id,
    segment_path,
)

CHUNK = 1 << 20
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can make what belongs to another user")


@pytest.fixture
def memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Stands for /dev/shm: everybody may make files there."""
    shared = tmp_path / "shm"
    shared.mkdir()
    shared.chmod(0o1777)
    monkeypatch.setattr(segments, "segment_directory", lambda: shared)
    return shared


def write(path: Path, size: int = 1000) -> None:
    SegmentWriter().write(path, memoryview(b"w" * size), CHUNK)


def test_what_a_run_has_is_its_owners_alone_and_lies_under_a_name_of_its_own(tmp_path: Path, memory: Path) -> None:
    before = os.umask(0)
    try:
        paths = [segment_path(tmp_path / name, 1) for name in ("a", "b")]
        for path in paths:
            write(path)
    finally:
        os.umask(before)
    assert len({path.parent for path in paths}) == 2
    assert segment_path(tmp_path / "a", 1) == paths[0], "the same in its next life"
    for path, run_dir in zip(paths, ("a", "b"), strict=True):
        assert path_id(tmp_path / run_dir) not in path.parent.name, "nothing that could be computed"
        assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        assert stat.S_IMODE((tmp_path / run_dir / "memory.id").stat().st_mode) == 0o600


def test_what_a_run_has_in_memory_is_counted_and_nothing_of_others(tmp_path: Path, memory: Path) -> None:
    assert bytes_in_memory(tmp_path / "a") == 0
    write(segment_path(tmp_path / "a", 1), 1000)
    write(segment_path(tmp_path / "a", 2), 500)
    write(segment_path(tmp_path / "b", 1), 70)
    assert bytes_in_memory(tmp_path / "a") == 1500


def test_processes_that_begin_at_the_same_time_have_one_id(tmp_path: Path) -> None:
    begin, found = threading.Barrier(8), list[str]()

    def ask() -> None:
        begin.wait(10)
        found.append(run_id(tmp_path / "run"))

    threads = [threading.Thread(target=ask) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
    assert (len(found), set(found)) == (8, {run_id(tmp_path / "run")})
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["memory.id"]


def test_a_node_keeps_the_id_that_the_head_says_and_a_file_that_holds_none_is_replaced(tmp_path: Path) -> None:
    assert known_run_id(tmp_path) is None
    (tmp_path / "memory.id").write_text("../../etc")
    assert known_run_id(tmp_path) is None
    assert keep_run_id(tmp_path, "ab" * 16) == run_id(tmp_path) == "ab" * 16
    assert keep_run_id(tmp_path, "cd" * 16) == "ab" * 16


def test_a_run_finds_and_removes_all_of_its_own_and_nothing_else(tmp_path: Path, memory: Path) -> None:
    mine, other = segment_path(tmp_path / "mine", 1), segment_path(tmp_path / "other", 1)
    former = memory / f"headrace-{path_id(tmp_path / 'mine')}-v3"  # an older version of ours left it
    former.touch()
    held = held_path(mine, "rollout-0")
    for path in (mine, other, held):
        write(path)
    assert remove_held_by(tmp_path / "mine", ["rollout-0"], 7) == 1
    assert not held.exists()
    assert remove_segments(tmp_path / "mine") == 2
    assert sorted(memory.iterdir()) == [other.parent]
    write(mine)  # a late one makes its place again
    assert remove_segments(tmp_path / "mine") == 1
    assert remove_segments(tmp_path / "never") == 0
    assert not (tmp_path / "never").exists()


def test_a_link_is_not_followed_whoever_has_laid_it(tmp_path: Path, memory: Path) -> None:
    segment = segment_path(tmp_path / "run", 1)
    victim = tmp_path / "victim"
    victim.write_bytes(b"precious")
    for planted in (segment, partial_path(segment)):
        planted.symlink_to(victim)
        for mode in ("rb", "wb", "a+b"):
            with pytest.raises(OSError, match="symbolic links"):
                open_ours(planted, mode)
    with pytest.raises(OSError, match="symbolic links"):
        write(segment)
    with pytest.raises(OSError, match="symbolic links"):
        map_segment(segment)
    assert victim.read_bytes() == b"precious"


def test_what_is_no_file_is_not_waited_for(tmp_path: Path, memory: Path) -> None:
    """A named pipe would hold up whoever opens it."""
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(PermissionError, match="no file of ours"):
        open_ours(tmp_path / "pipe", "rb")


def test_a_directory_that_is_a_link_or_open_to_others_is_refused(tmp_path: Path, memory: Path) -> None:
    place = segments.memory_of(run_id(tmp_path / "run"))
    (tmp_path / "elsewhere").mkdir()
    place.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(PermissionError, match="is a link"):
        segment_path(tmp_path / "run", 1)
    place.unlink()
    place.mkdir()
    place.chmod(0o777)
    with pytest.raises(PermissionError, match="open to others"):
        segment_path(tmp_path / "run", 1)


@as_root
def test_what_is_another_users_is_refused(tmp_path: Path, memory: Path) -> None:
    segment = segment_path(tmp_path / "run", 1)
    write(segment)
    os.chown(segment, 4711, 4711)
    for mode in ("rb", "a+b"):
        with pytest.raises(PermissionError, match="no file of ours"):
            open_ours(segment, mode)
    os.chown(segment.parent, 4711, 4711)
    with pytest.raises(PermissionError, match="another user's"):
        segment_path(tmp_path / "run", 2)


def test_a_name_from_the_wire_leads_nowhere_else(tmp_path: Path, memory: Path) -> None:
    for name in ("x", "headrace-..-v1", "headrace-v1", "headrace-zz-v1", ".."):
        with pytest.raises(PermissionError, match="not the name of a segment"):
            held_path(Path("/dev/shm") / name, "rollout-0")
    assert list(memory.iterdir()) == []


def test_a_simulated_run_is_named_after_its_job_wherever_it_lies_as_its_seed_fixes_everything(tmp_path: Path) -> None:
    token = SIMULATED_HOST.set(Host("here", tmp_path))
    try:
        assert segment_path(tmp_path / "run", 1) == segment_path(tmp_path / "elsewhere" / "run", 1)
        assert segment_path(tmp_path / "run", 1) != segment_path(tmp_path / "other", 1)
        assert not (tmp_path / "run").exists()
    finally:
        SIMULATED_HOST.reset(token)
