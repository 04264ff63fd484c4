"""Calls beside a peer's: the figures of the two sides are compared the right way round."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from benchmarks.peers import _calls
from benchmarks.peers._calls import compare

FAKE = """import json
print(json.dumps({"version": "1.2", "rtt_p50_us": 1e9, "pipelined_per_second": 0.001}))
"""


def test_times_say_how_often_we_are_as_fast_by_medians() -> None:
    ours = [{"rtt_p50_us": 100.0, "pipelined_per_second": rate} for rate in (1.0, 24_000.0, 30_000.0)]
    peers = [{"rtt_p50_us": 800.0, "pipelined_per_second": 2000.0}]
    found = compare(ours, peers)
    assert found["times_rtt"] == 8.0
    assert found["times_pipelined"] == 12.0


def test_a_peer_runs_in_its_own_interpreter_and_both_sides_are_printed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (worker := tmp_path / "worker.py").write_text(FAKE)
    assert _calls.main("fake", worker, ["--python", sys.executable, "--count", "128", "--rounds", "1"]) == 0
    assert "fake 1.2  round trip 1000000000.0 µs" in capsys.readouterr().out
