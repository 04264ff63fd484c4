"""Another user of the machine offers a run to look at, and exchanges its files while it is looked at.

Root looks, so that nothing but Headrace keeps a command from what the other user cannot open.
"""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from typer.testing import CliRunner

from configs.run_files import JOB_FILE, METRICS, SAMPLES
from supervisors.cli.app import app
from tests.supervisors.cli.console.recorded_run import record, sample

OTHER = 4711
LOOKS = 4
PRECIOUS = "nobody but root may read or write this"


@pytest.fixture
def theirs() -> Iterator[Path]:
    """A directory of another user."""
    directory = Path(tempfile.mkdtemp(prefix="headrace-tests-", dir="/tmp"))
    os.chown(directory, OTHER, OTHER)
    directory.chmod(0o755)
    yield directory
    shutil.rmtree(directory, ignore_errors=True)


def exchange(run_dir: Path, outside: Path, room: Path) -> None:
    """Put links out of the run in the place of its files, and the files back, again and again."""
    names = ("plots/index.html", "plots/reward.png", METRICS, SAMPLES, JOB_FILE, "plots")
    (run_dir / "plots").mkdir(exist_ok=True)
    while True:
        for name in names:
            path, kept = run_dir / name, run_dir / f"{Path(name).name}.kept"
            with suppress(OSError):
                if path.exists() and not path.is_symlink():
                    path.rename(kept)
                path.symlink_to(room if name == "plots" else outside)
                time.sleep(0.002)
                path.unlink()
                kept.rename(path)


@pytest.mark.cluster
@pytest.mark.timeout(120)
@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_what_another_user_links_to_is_neither_read_nor_written(theirs: Path, tmp_path: Path) -> None:
    tmp_path.chmod(0o700)
    outside, room = tmp_path / "precious", tmp_path / "room"
    outside.write_text(sample(0, prompt_text=PRECIOUS).__repr__().replace("'", '"').replace("None", "null"))
    room.mkdir()
    before = outside.read_bytes()
    child = os.fork()
    if child == 0:
        try:
            os.setgroups([])
            os.setgid(OTHER)
            os.setuid(OTHER)
            exchange(record(theirs / "demo"), outside, room)
        finally:
            os._exit(0)
    try:
        deadline = time.monotonic() + 60
        while not (theirs / "demo" / "plots").exists() and time.monotonic() < deadline:
            time.sleep(0.05)
        for _ in range(LOOKS):
            for command in (["plot"], ["samples", "--json"], ["runs"]):
                result = CliRunner().invoke(app, [command[0], str(theirs / "demo"), *command[1:]])
                assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
                assert PRECIOUS not in result.output
    finally:
        os.kill(child, 9)
        os.waitpid(child, 0)
    assert outside.read_bytes() == before
    assert list(room.iterdir()) == []
