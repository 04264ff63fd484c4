"""What ``headrace bench recovery`` and ``headrace bench chaos`` make of what they have seen: pure, no process."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks._harm import Harm, percentile
from benchmarks.jobs.chaos import Window, away_s, compare
from benchmarks.jobs.recovery import GOALS, figures, missed


def test_percentiles_are_times_that_were_measured() -> None:
    values = [0.1 * n for n in range(20, 0, -1)]
    assert percentile(values, 0.5) == pytest.approx(1.0)
    assert percentile(values, 0.99) == pytest.approx(2.0)
    assert percentile([7.0], 0.5) == percentile([7.0], 0.99) == 7.0


def test_one_figure_for_many_times_is_the_longest_but_for_the_percentiles() -> None:
    found = figures({"reassign_s": [0.1, 0.3, 0.2], "detect_exit_s": [0.01, 0.03], "head_to_progress_s": [2.0, 4.0]})
    assert found == {
        "reassign_p50_s": 0.2,
        "reassign_p99_s": 0.3,
        "reassign_max_s": 0.3,
        "detect_exit_s": 0.03,
        "head_to_progress_s": 4.0,
    }


def test_a_missed_goal_is_named_with_both_figures_and_a_met_one_is_not() -> None:
    assert missed(dict(GOALS)) == []
    [problem] = missed(GOALS | {"reassign_p50_s": 0.31})
    assert "reassign_p50_s" in problem and "0.31" in problem and "0.3" in problem


def version(worker: str, time_s: float) -> dict[str, Any]:
    return {"event": "worker_version", "worker": worker, "time_s": time_s}


def test_a_worker_is_away_until_it_serves_again_and_no_longer_than_the_window() -> None:
    window = Window(100.0, 200.0, 1000)
    kills = [Harm("a", 99.0), Harm("b", 120.0), Harm("a", 198.0)]
    events = [version("a", 98.0), version("b", 110.0), version("a", 101.5), version("b", 123.0), version("b", 125.0)]
    assert away_s(kills, events, window) == [1.5, 3.0, 2.0]
    assert away_s([Harm("a", 90.0)], [version("a", 95.0)], window) == [], "before anything is measured"


def test_what_is_lost_beyond_the_capacity_that_was_away_is_the_cost() -> None:
    alone, harmed = Window(0.0, 90.0, 9000), Window(0.0, 100.0, 9000)
    told = compare(alone, harmed, [20.0, 4.0], workers=4)
    assert (told["lost"], told["away"], told["beyond"]) == (0.1, 0.06, 0.04)
