"""``headrace bench adapters``: what it makes of rounds, and a real run of it that is as short as it can be."""

from __future__ import annotations

import json

import pytest

from benchmarks.jobs import adapters


def test_figures_are_medians_and_side_by_side_is_held_against_turns() -> None:
    found = adapters.compared({"side": [80.0, 90.0, 10.0], "turns": [40.0, 39.0, 41.0], "one": [100.0, 99.0, 101.0]})
    assert (found["ours"], found["limit"], found["ratio"], found["gain"]) == (80, 100, 0.8, 2.0)
    assert found["missed"] == []
    assert adapters.compared({"side": [30.0], "turns": [40.0], "one": [100.0]})["missed"]


@pytest.mark.long
def test_a_short_run_measures_every_way(capsys: pytest.CaptureFixture[str]) -> None:
    sizes = {"adapters": 3, "each": 2, "tokens": 4, "rounds": 1, "hidden": 64, "layers": 2, "vocabulary": 100}
    assert adapters.main(["--json", *(word for name, size in sizes.items() for word in (f"--{name}", str(size)))]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["ranks"] == [8, 16, 32] and result["sequences"] == 6
    assert result["ours"] > 0 and result["limit"] > 0 and result["turns"] > 0
