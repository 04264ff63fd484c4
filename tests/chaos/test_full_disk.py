"""The run's disk, or shared memory, fills up in mid-run: the run ends or goes on, and is whole when it is resumed.

Each run has file systems of its own in a mount namespace, so that nobody else's disk is filled; that takes root.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import pytest
import yaml
from small_job import simulated_job

ROOT = Path(__file__).resolve().parents[2]
STEPS = 10
DISK_BYTES, SHARED_MEMORY_BYTES = 40 << 20, 4 << 20
END_S = 30.0
"""Within this a run on a full disk has ended: the first write that fails is a permanent error. It took up to 0.7 s."""
RESUMED_S = 150.0
"""Within this a resumed run of ten short steps is over, on a machine that is busy with other tests."""

Place = Literal["disk", "shared memory"]
MOMENTS = [
    pytest.param(place, moment, marks=[pytest.mark.long] if moment or place != "disk" else [])
    for place in ("disk", "shared memory")
    for moment in range(10)
]


class SmallDisks:
    """A mount namespace with a small disk at ``directory`` and a small /dev/shm, for as long as it is not closed."""

    def __init__(self, directory: Path) -> None:
        directory.mkdir()
        self.directory = directory
        sizes = {directory: DISK_BYTES, "/dev/shm": SHARED_MEMORY_BYTES}
        mounts = " && ".join(f"mount -t tmpfs -o size={size} none {place}" for place, size in sizes.items())
        self._holder = subprocess.Popen(
            ["unshare", "-m", "sh", "-c", f"{mounts} && echo ready && exec sleep 3600"],
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self._holder.stdout is not None
        if self._holder.stdout.readline().strip() != "ready":
            pytest.skip("file systems cannot be mounted here")
        self._root = Path(f"/proc/{self._holder.pid}/root")

    def path(self, place: Place) -> Path:
        """The file system as it is seen from outside."""
        return self._root / (self.directory.relative_to("/") if place == "disk" else "dev/shm")

    def start(self, *words: str, said: Path) -> subprocess.Popen[bytes]:
        env = {**os.environ, "PYTHONPATH": str(ROOT)}
        command = ["nsenter", "-t", str(self._holder.pid), "-m", sys.executable, "-P", "-m", "main", *words]
        with said.open("wb") as out:
            return subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=out, stderr=out, env=env)

    def fill(self, place: Place) -> None:
        """To the last byte."""
        with (self.path(place) / "ballast").open("ab", buffering=0) as file:
            for size in (1 << 20, 4096, 1):
                try:
                    while file.write(b"x" * size):
                        pass
                except OSError:
                    continue

    def free(self, place: Place) -> None:
        (self.path(place) / "ballast").unlink()

    def close(self) -> None:
        self._holder.kill()
        self._holder.wait()
        assert self._holder.stdout is not None
        self._holder.stdout.close()


@pytest.fixture
def disks(tmp_path: Path) -> Iterator[SmallDisks]:
    if os.geteuid() != 0 or shutil.which("unshare") is None or shutil.which("nsenter") is None:
        pytest.skip("only root may mount file systems")
    made = SmallDisks(tmp_path / "disk")
    yield made
    made.close()


@pytest.mark.timeout(500)
@pytest.mark.parametrize(("place", "moment"), MOMENTS)
def test_a_full_disk_costs_no_sample_and_trains_none_twice(
    disks: SmallDisks, small_model: Path, tmp_path: Path, place: Place, moment: int
) -> None:
    draw = random.Random(f"{place} {moment}")
    job, run_dir = tmp_path / "job.yaml", disks.directory / "run"
    job.write_text(yaml.safe_dump(simulated_job(small_model, steps=STEPS, checkpoint={"every": 2})))
    first = disks.start("run", str(job), "--dir", str(run_dir), "--json", said=tmp_path / "first.txt")
    try:
        _wait_for_rows(disks.path("disk") / "run" / "metrics.jsonl", draw.randrange(1, STEPS - 3), first)
        time.sleep(draw.uniform(0.0, 0.4))
        disks.fill(place)
        code = first.wait(END_S)
    finally:
        first.kill()
    said = (tmp_path / "first.txt").read_text()
    assert code in (0, 1), said
    assert code == 0 or "make room" in _summary(tmp_path / "first.txt")["error"], said
    disks.free(place)

    again = disks.start("run", "--resume", str(run_dir), "--json", said=tmp_path / "again.txt")
    assert again.wait(RESUMED_S) == 0, (tmp_path / "again.txt").read_text()
    summary = _summary(tmp_path / "again.txt")
    assert (summary["state"], summary["steps"]) == ("finished", STEPS)
    assert (summary["prompts_lost"], summary["samples_trained_twice"]) == (0, 0)
    rows = [json.loads(line) for line in (disks.path("disk") / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == list(range(STEPS)), "each step has its row, once"
    doctor = disks.start("doctor", "--run", str(run_dir), "--json", said=tmp_path / "doctor.txt")
    assert doctor.wait(60) == 0, (tmp_path / "doctor.txt").read_text()


def _wait_for_rows(path: Path, count: int, process: subprocess.Popen[bytes]) -> None:
    until_s = time.monotonic() + 120
    while time.monotonic() < until_s and process.poll() is None:
        if path.exists() and len(path.read_bytes().splitlines()) >= count:
            return
        time.sleep(0.02)
    raise AssertionError(f"the run did not come to {count} steps")


def _summary(said: Path) -> dict[str, Any]:
    return json.loads(next(line for line in reversed(said.read_text().splitlines()) if line.startswith("{")))
