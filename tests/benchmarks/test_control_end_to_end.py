"""``headrace bench control``, small: a real head answers while tokens and weights flow, nobody seems silent."""

from __future__ import annotations

import json

import pytest

from benchmarks._jobs import BenchmarkFailed
from benchmarks.data_plane import control


@pytest.mark.long
@pytest.mark.timeout(300)
def test_bench_control_asks_a_head_under_load_and_tells_how_late_it_and_its_processes_were(
    capsys: pytest.CaptureFixture[str],
) -> None:
    small = ["--seconds", "3", "--workers", "4", "--sequences", "8", "--tokens", str(1 << 21), "--bytes", "4000000"]
    assert control.main(["--json", *small]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["tokens_per_second"] > 0 and found["weights_gb_per_second"] > 0
    assert set(found["answers"]) == set(control.OPS)
    assert 0 < found["answer_p50_ms"] <= found["answer_p99_ms"] <= found["answer_max_ms"]
    assert found["answer_count"] == sum(each["count"] for each in found["answers"].values())
    assert set(found["lags_p99_ms"]) == {"head", "weights", "rewards", "trainer"}
    assert found["late_heartbeats"] == 0 and found["looks"] > 0


@pytest.mark.long
@pytest.mark.timeout(300)
def test_bench_control_fails_where_nothing_flows_any_more_while_it_asks(capsys: pytest.CaptureFixture[str]) -> None:
    small = ["--seconds", "1", "--workers", "1", "--sequences", "2", "--tokens", "4096", "--bytes", "4000000"]
    with pytest.raises(BenchmarkFailed, match=r"nothing was measured|more --tokens than 4096"):
        control.main(["--json", *small])


def test_a_figure_beyond_its_goal_is_told_and_one_at_it_is_not() -> None:
    fine = {"answer_p99_ms": 50.0, "lag_p99_ms": 20.0, "late_heartbeats": 0}
    assert control.missed(fine) == []
    assert control.missed(fine | {"late_heartbeats": 1}) == ["late_heartbeats: 1, the goal is 0"]
