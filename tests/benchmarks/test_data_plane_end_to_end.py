"""``headrace bench tell`` and ``stream``, short, and ``all`` over them: what they print adds up, nothing is lost."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks import _baseline
from benchmarks._baseline import Ratio
from benchmarks.data_plane import all as everything
from benchmarks.data_plane import stream, tell

NEW: dict[str, Any] = {"hardware": {"class": "x"}, "rtt": {"ratio": 1.5}, "share": 0.5}


def last_json(capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    return json.loads(capsys.readouterr().out)


def test_bench_tell_loses_nothing_of_one_sender_and_of_64_and_hears_each_of_them(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert tell.main(["--json", "--count", "2048"]) == 0
    found = last_json(capsys)
    assert found["ratio"] == pytest.approx(found["per_second"] / found["raw_per_second"], rel=0.01)
    assert found["lost"] == 0 and found["sender_cpu_us"] > 0 and found["receiver_cpu_us"] > 0
    assert found["fan_in"]["connections"] == 64 and found["fan_in"]["lost"] == 0
    assert 0 <= found["fan_in"]["slowest_share"] <= 1  # too short a run to say more


def test_bench_stream_prints_ours_the_raw_streams_and_their_ratios(capsys: pytest.CaptureFixture[str]) -> None:
    assert stream.main(["--json", "--items", "512", "--chunks", "16"]) == 0
    found = last_json(capsys)
    for kind in ("items", "chunks"):
        row = found[kind]
        assert row["raw_per_second"] > 0 and row["consumer_cpu_us"] > 0
        assert row["ratio"] == pytest.approx(row["per_second"] / row["raw_per_second"], rel=0.05)


def test_bench_all_gives_one_object_by_name_and_fails_with_the_one_that_fails(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fake(command: list[str], *, timeout_s: float) -> str:
        if "benchmarks.data_plane.stream" in command:
            raise everything.BenchmarkFailed("broken")
        return json.dumps({"command": command[2:]})

    monkeypatch.setattr(everything, "last_line", fake)
    assert everything.main(["--json", "--only", "tell,ask"]) == 0
    assert last_json(capsys) == {
        "ask": {"command": ["benchmarks.data_plane.ask", "--json", "--count", "1024"]},
        "tell": {"command": ["benchmarks.data_plane.tell", "--json", "--count", "16384"]},
    }
    assert everything.main(["--json", "--only", "ask,stream", "--long"]) == 1
    assert last_json(capsys) == {
        "ask": {"command": ["benchmarks.data_plane.ask", "--json"]},
        "stream": {"error": "broken"},
    }


@pytest.mark.parametrize(
    ("ratio", "before", "problem"),
    [
        (Ratio("rtt.ratio", ceiling=1.6), 1.5, None),
        (Ratio("rtt.ratio", ceiling=1.4), None, "rtt: ratio 1.5 is above the ceiling 1.4"),
        (Ratio("rtt.ratio", ceiling=1.6), 1.3, "rtt: ratio 1.5 was 1.3, more than 10% more"),
        (Ratio("share", floor=0.6), None, "share: 0.5 is below the floor 0.6"),
        (Ratio("share", floor=0.1), 0.8, "share: 0.5 was 0.8, more than 10% less"),
        (Ratio("absent", floor=9.0), 9.0, None),
    ],
)
def test_a_ratio_is_held_against_its_bound_and_its_baseline(
    ratio: Ratio, before: float | None, problem: str | None
) -> None:
    old = {"hardware": {"class": "x"}, "rtt": {"ratio": before}, "share": before}
    assert _baseline.check(NEW, old, [ratio]) == ([] if problem is None else [problem])


def test_a_result_becomes_the_baseline_and_a_worse_one_is_then_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import argparse

    monkeypatch.setattr(_baseline, "BASELINES", tmp_path)
    write = argparse.Namespace(check=False, write_baseline=True)
    look = argparse.Namespace(check=True, write_baseline=False)
    ratios = [Ratio("share", floor=0.0)]
    assert _baseline.settle(NEW, "b", ratios, write) == 0
    assert _baseline.settle(NEW, "b", ratios, look) == 0
    assert _baseline.settle({**NEW, "share": 0.4}, "b", ratios, look) == 1
