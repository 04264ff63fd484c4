"""``headrace bench soak``, short: every process of a harmed run is looked at, and nothing of it stays behind."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from actors.weights.segments import run_id
from benchmarks._samples import Growth, Life, Sample, growth
from benchmarks.jobs import soak

MIB = 1 << 20
FINE = {"resident_mib": (100.0, 104.0), "drift": 0.04, "fds": (9, 9), "threads": (3, 3)}


@pytest.mark.long
@pytest.mark.timeout(300)
def test_bench_soak_looks_at_every_process_of_a_run_that_it_harms_and_finds_nothing_left(
    capsys: pytest.CaptureFixture[str],
) -> None:
    short = ["--minutes", "0.33", "--every-s", "1", "--kill-every-s", "9", "--warm-s", "1", "--life-s", "6"]
    assert soak.main(["--json", *short]) == 0
    found = json.loads(capsys.readouterr().out)
    assert {"head", "machine", "node", "puller", "rewards", "trainer", "weights"} <= set(found["processes"])
    assert found["steps"] > 0 and sum(found["kills"].values()) >= 1
    assert found["segments_max"] > 0 and found["segments_left"] == []
    assert found["prompts_lost"] == 0 and found["samples_trained_twice"] == 0


def life(resident_mib: list[float], fds: list[int]) -> Life:
    return Life(
        "x",
        1,
        [Sample(10.0 * i, int(r * MIB), MIB, f, 3) for i, (r, f) in enumerate(zip(resident_mib, fds, strict=True))],
    )


def test_growth_compares_the_last_quarter_with_the_first_after_the_warm_up() -> None:
    found = growth(life([50, 100, 100, 101, 103, 105, 110, 110, 110], [3, 9, 8, 8, 9, 8, 8, 9, 8]), 10.0, 60.0)
    assert found == Growth(
        "x", 70.0, (100.0, 110.0), (1.0, 1.0), (9, 8), (3, 3), (100, 100, 101, 103, 105, 110, 110, 110)
    )
    assert found.drift == pytest.approx(0.1)


def test_a_life_that_did_not_last_is_not_told_of() -> None:
    assert growth(life([1, 1, 1, 1, 1], [1, 1, 1, 1, 1]), 20.0, 60.0) is None


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({}, []),
        ({"drift": 0.06}, ["x: resident memory +6.0%, the goal is within 5%"]),
        ({"fds": (9, 10)}, ["x: at the end always more fds than ever at its beginning, 10 and 9"]),
    ],
)
def test_what_has_grown_is_told(wrong: dict[str, object], said: list[str]) -> None:
    assert soak.missed({"processes": {"x": FINE | wrong}, "segments_left": []}) == said


def test_a_segment_that_is_left_is_told() -> None:
    assert soak.missed({"processes": {}, "segments_left": ["v1"]}) == ["segments left in shared memory: ['v1']"]


def test_segments_are_found_wherever_they_lie_though_a_neighbours_directory_goes_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scandir, run = os.scandir, tmp_path / "run"
    monkeypatch.setattr(soak, "segment_directory", lambda: tmp_path / "shm")
    for place in ("", "elsewhere", "gone"):
        (tmp_path / "shm" / place).mkdir(exist_ok=True)
        (tmp_path / "shm" / place / f"headrace-{run_id(run)}-v1").touch()
    (tmp_path / "shm" / "headrace-of-another-run-v1").touch()

    def vanishing(path: Any = ".") -> Any:
        if Path(path).name == "gone":
            raise FileNotFoundError(path)
        return scandir(path)

    monkeypatch.setattr(os, "scandir", vanishing)
    assert sorted(path.parent.name for path in soak.segments(run)) == ["elsewhere", "shm"]
