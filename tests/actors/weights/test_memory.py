"""Segments in memory: what a writer that was killed has prepared is given back by the next one."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from actors.weights import memory
from actors.weights.memory import SegmentWriter

NO_PID = 1 << 30
"""More than any kernel gives."""


def test_a_spare_segment_of_a_writer_that_is_dead_is_removed_and_that_of_a_living_one_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory, "PARALLEL_BYTES", 1)
    for name in (f"headrace-ab-{NO_PID}-spare", f"headrace-ab-{os.getppid()}-spare", f"headrace-cd-{NO_PID}-spare"):
        (tmp_path / name).touch()
    writer = SegmentWriter()
    writer.prepare(tmp_path / "headrace-ab-v3@rollout-0", 4096)
    ours, theirs = f"headrace-ab-{os.getpid()}-spare", f"headrace-ab-{os.getppid()}-spare"
    assert {file.name for file in tmp_path.iterdir()} == {ours, theirs, f"headrace-cd-{NO_PID}-spare"}
    writer.close()
    assert not (tmp_path / ours).exists()
