"""``headrace bench ask``, short: both sides answer, and the ratios are those of the figures beside them."""

from __future__ import annotations

import json

import pytest

from benchmarks.data_plane import ask


def test_bench_ask_prints_ours_the_raw_echos_and_their_ratios(capsys: pytest.CaptureFixture[str]) -> None:
    assert ask.main(["--json", "--count", "256"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["raw_rtt_p50_us"] > 0 and found["ratio_rtt"] == pytest.approx(
        found["rtt_p50_us"] / found["raw_rtt_p50_us"], rel=0.01
    )
    assert found["rtt_p99_us"] >= found["rtt_p50_us"] and found["asker_cpu_us"] > 0
    assert found["ratio_pipelined"] == pytest.approx(
        found["pipelined_per_second"] / found["raw_pipelined_per_second"], rel=0.01
    )
