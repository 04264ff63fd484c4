"""``headrace bench compile``: what it makes of its two runs, and real ones that are as short as they can be."""

from __future__ import annotations

import json

import pytest

from benchmarks.gpu import compile as bench


def run_of(seconds: float, *, graphs: int = 0, norm: float = 1.0) -> dict[str, float]:
    return {
        "added_bytes": 100, "seconds": seconds, "cpu_s": seconds, "norm": norm, "start_s": 1.0, "graphs": graphs,
    }  # fmt: skip


def test_the_ratio_is_told_and_layers_that_stayed_plain_or_learn_something_else_are_missed() -> None:
    found = bench.judged(run_of(2.0), run_of(1.0, graphs=6), "float32")
    assert (found["ratio"], found["missed"]) == (0.5, [])
    (missed,) = bench.judged(run_of(2.0), run_of(1.0), "float32")["missed"]
    assert "nothing was compiled" in missed
    (missed,) = bench.judged(run_of(2.0), run_of(1.0, graphs=6, norm=1.1), "float32")["missed"]
    assert "1.0e-01 apart" in missed


@pytest.mark.long
def test_bench_compile_reaches_its_goals(capsys: pytest.CaptureFixture[str]) -> None:
    assert bench.main(["--json", "--check", "--tokens", "1024", "--hidden", "32", "--layers", "2"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["compiled"]["graphs"] > 0
    assert result["ratio"] > 0
