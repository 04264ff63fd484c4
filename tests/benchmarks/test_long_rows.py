"""``headrace bench long_rows``: what it makes of two runs, and a real one that is as short as it can be."""

from __future__ import annotations

import json
from typing import Any

import pytest

from benchmarks.gpu import long_rows


def run_of(peak_mib: int, seconds: float, computed: int = 100) -> dict[str, Any]:
    return {"peak_added_mib": peak_mib, "seconds": seconds, "computed_tokens": computed, "distinct_tokens": 100}


def test_each_case_is_held_against_its_goals_and_memory_against_a_dense_mask_alone() -> None:
    assert long_rows.judged("group", run_of(50, 1.0), run_of(100, 2.0), 9e-5)["missed"] == []
    missed = long_rows.judged("group", run_of(51, 1.0, 106), run_of(100, 2.0), 2e-4)["missed"]
    assert [line.split(" is ")[0] for line in missed] == [
        "group: of_its_memory", "group: gradient_difference", "group: computed_of_distinct",
    ]  # fmt: skip
    found = long_rows.judged("each", run_of(90, 1.0), run_of(100, 4.0), 1e-6)
    assert (found["missed"], found["of_its_memory"], found["of_its_time"]) == ([], 0.9, 0.25)


@pytest.mark.long
@pytest.mark.timeout(300)  # half a minute on an idle machine
def test_bench_long_rows_reaches_its_goals(capsys: pytest.CaptureFixture[str]) -> None:
    assert long_rows.main(["--json", "--check", "--cases", "group", "--tokens", "8192"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["missed"] == []
    assert found["group"]["distinct_tokens"] == 8184
