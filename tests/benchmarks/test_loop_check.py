"""The regression check of ``headrace bench loop``: pure, on results as the benchmark makes them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from benchmarks._baseline import file_of
from benchmarks._jobs import BenchmarkFailed, last_line, samples_per_second
from benchmarks.jobs.loop import baseline_name, check, compare


def result(*, sync: float = 0.95, asynchronous: float = 1.2, of: str = "x86_64-avx512-2core") -> dict[str, Any]:
    return {"hardware": {"class": of}, "sync": {"ratio": sync}, "async": {"ratio": asynchronous}}


def test_a_result_as_good_as_its_baseline_has_no_problem():
    assert check(result(), result()) == []


def test_a_ratio_that_fell_by_more_than_the_tolerance_is_named_with_both_figures():
    (problem,) = check(result(asynchronous=1.05), result(asynchronous=1.2))
    assert "async" in problem
    assert "1.05" in problem
    assert "1.2" in problem


def test_noise_within_the_tolerance_is_no_regression():
    assert check(result(asynchronous=1.1), result(asynchronous=1.2)) == []


def test_the_floor_holds_without_any_baseline():
    (problem,) = check(result(sync=0.89), None)
    assert "floor 0.9" in problem


def test_a_baseline_of_other_hardware_is_refused():
    (problem,) = check(result(), result(of="aarch64-default-8core"))
    assert "not comparable" in problem


def test_a_mode_that_was_not_measured_is_not_checked():
    measured = result()
    del measured["sync"]
    assert check(measured, result(sync=5.0)) == []


def test_the_ratio_is_of_medians_so_one_disturbed_run_does_not_decide():
    ours = [{"samples_per_second": speed} for speed in (900.0, 10.0, 1000.0)]
    loops = [{"samples_per_second": 1000.0}]
    assert compare(ours, loops)["ratio"] == pytest.approx(0.9)


def test_the_first_steps_do_not_count():
    steps = [{"samples": 10, "seconds": 100.0}, {"samples": 10, "seconds": 1.0}, {"samples": 30, "seconds": 1.0}]
    assert samples_per_second(steps, skip=1) == pytest.approx(20.0)


def test_the_baseline_names_its_class_of_hardware(tmp_path):
    machine = "x86_64-avx2-2core"
    own = file_of(baseline_name(Path("benchmarks/jobs/loop.yaml")), machine, tmp_path)
    assert own == tmp_path / "loop.x86_64-avx2-2core.json"
    quickstart = file_of(baseline_name(Path("configs/quickstart.yaml")), machine, tmp_path)
    assert quickstart.name == "loop-quickstart.x86_64-avx2-2core.json"


def test_a_measured_process_that_fails_says_why():
    import sys

    with pytest.raises(BenchmarkFailed, match="no such thing"):
        last_line([sys.executable, "-c", "raise SystemExit('no such thing')"], timeout_s=30.0)
