"""``headrace bench tokens``, small: what is streamed arrives, in the journal too, and figures fit each other."""

from __future__ import annotations

import json

import pytest

from benchmarks.data_plane import tokens


def test_bench_tokens_streams_into_ledger_and_journal_and_prints_the_limits(
    capsys: pytest.CaptureFixture[str],
) -> None:
    arguments = ["--json", "--workers", "4", "--sequences", "8", "--tokens", "64"]
    assert tokens.main(arguments) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["tokens"] == 4 * 8 * 64 and found["tokens_per_second"] > 0
    limit = found["raw_cpu_us_per_token"] + found["copy_cpu_us_per_token"]
    assert found["ratio_cpu"] == pytest.approx(found["cpu_us_per_token"] / limit, rel=0.05)
    assert found["tokens_per_collector_core_second"] == pytest.approx(1e6 / found["cpu_us_per_token"], rel=0.01)
