"""``headrace bench recompute``: what it makes of its runs, and real ones that are as short as they can be."""

from __future__ import annotations

import json

import pytest

from benchmarks.gpu import recompute


def run_of(added_bytes: int, norm: float = 1.0) -> dict[str, float]:
    return {"added_bytes": added_bytes, "seconds": 1.0, "cpu_s": 2.0, "norm": norm}


def test_a_way_that_takes_no_less_or_learns_something_else_is_told() -> None:
    assert recompute.judged({"none": run_of(100), "whole": run_of(40)}, "float32")["missed"] == []
    missed = recompute.judged({"none": run_of(100), "selective": run_of(100), "whole": run_of(40, 1.1)}, "float32")
    assert [line.partition(":")[0] for line in missed["missed"]] == ["selective", "whole"]
    assert missed["whole"]["of_its_memory"] == 0.4


@pytest.mark.long
def test_bench_recompute_reaches_its_goals(capsys: pytest.CaptureFixture[str]) -> None:
    assert recompute.main(["--json", "--check", "--tokens", "4096", "--layers", "4"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["whole"]["of_its_memory"] < result["selective"]["of_its_memory"] < 1
