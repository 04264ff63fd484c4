"""A run directory belongs to one run, for as long as that lives and no longer."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from configs.run_files import RUN_LOCK
from supervisors.machine import run_directory
from supervisors.machine.run_directory import RunLock, make_run_directory
from supervisors.tree.errors import DirectoryInUse

ROOT = Path(__file__).resolve().parents[3]
HOLDS = """
import sys, time
from pathlib import Path
from supervisors.machine.run_directory import RunLock
lock = RunLock.take(Path(sys.argv[1]), int(sys.argv[2]) or None)
print("held", flush=True)
time.sleep(60)
"""


def hold(run_dir: Path, owner: int = 0) -> subprocess.Popen[str]:
    words = [sys.executable, "-c", HOLDS, str(run_dir), str(owner)]
    holder = subprocess.Popen(words, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    assert holder.stdout is not None and holder.stdout.readline() == "held\n"
    return holder


def end(holder: subprocess.Popen[str]) -> None:
    holder.kill()
    holder.wait(timeout=10)
    assert holder.stdout is not None
    holder.stdout.close()


def test_runs_that_begin_at_once_get_a_directory_each(tmp_path: Path) -> None:
    made: list[Path] = []
    start = threading.Barrier(8)

    def make() -> None:
        start.wait(timeout=10)
        made.append(make_run_directory(tmp_path / "runs", "j"))

    threads = [threading.Thread(target=make) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=10)
    assert sorted(path.name for path in made) == sorted(["j", *(f"j-{n}" for n in range(2, 9))])


def test_a_second_process_is_refused_with_the_first_one_s_pid_and_touches_nothing(tmp_path: Path) -> None:
    holder = hold(tmp_path)
    try:
        before = (tmp_path / RUN_LOCK).read_bytes()
        with pytest.raises(DirectoryInUse, match=rf"in use by process {holder.pid} on "):
            RunLock.take(tmp_path)
        assert (tmp_path / RUN_LOCK).read_bytes() == before
    finally:
        end(holder)
    RunLock.take(tmp_path).release()  # a killed process holds nothing


def test_the_same_directory_by_another_name_is_the_same(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "run")
    with RunLock.take(tmp_path / "run"), pytest.raises(DirectoryInUse):
        RunLock.take(tmp_path / "link")


def test_between_two_lives_of_a_head_its_machine_process_keeps_the_directory(tmp_path: Path) -> None:
    machine = subprocess.Popen(["sleep", "60"])
    try:
        head = hold(tmp_path, machine.pid)
        end(head)
        with pytest.raises(DirectoryInUse, match=str(machine.pid)):
            RunLock.take(tmp_path)
        end(hold(tmp_path, machine.pid))  # its next life
    finally:
        machine.kill()
        machine.wait(timeout=10)
    RunLock.take(tmp_path).release()


def test_a_process_that_has_the_number_of_one_that_is_gone_holds_nothing(tmp_path: Path) -> None:
    other = subprocess.Popen(["sleep", "60"])
    try:
        record = {"pid": other.pid, "host": run_directory.platform.node(), "born": time.time() - 86400}
        (tmp_path / RUN_LOCK).write_text(json.dumps(record))
        RunLock.take(tmp_path).release()
    finally:
        other.kill()
        other.wait(timeout=10)


@pytest.mark.parametrize("content", ["", "[]", "{", '{"pid": "x"}', '{"pid": -1}', "\0\0"])
def test_a_damaged_record_refuses_nobody(tmp_path: Path, content: str) -> None:
    (tmp_path / RUN_LOCK).write_text(content)
    RunLock.take(tmp_path).release()


def test_a_planted_link_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "theirs").write_text("precious")
    run = tmp_path / "run"
    run.mkdir()
    (run / RUN_LOCK).symlink_to(tmp_path / "theirs")
    with pytest.raises(OSError):
        RunLock.take(run)
    assert (tmp_path / "theirs").read_text() == "precious"


def test_a_file_system_without_locks_is_kept_by_the_record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def none(*_: object) -> None:
        raise OSError(37, "No locks available")

    monkeypatch.setattr(run_directory.fcntl, "flock", none)
    holder = hold(tmp_path)
    try:
        with pytest.raises(DirectoryInUse, match=str(holder.pid)):
            RunLock.take(tmp_path)
    finally:
        end(holder)
