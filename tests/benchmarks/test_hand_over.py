"""``headrace bench hand_over``: what it compares, and what it makes of the figures."""

from __future__ import annotations

import json
from typing import Any

import pytest

from benchmarks.jobs import hand_over
from benchmarks.jobs.hand_over import Case


def case(mode: str, ratio: float) -> dict[str, Any]:
    return {"mode": mode, "ratio": ratio}


def test_a_mode_in_which_the_estimate_costs_time_on_the_whole_is_a_goal_missed() -> None:
    found = hand_over.judged([case("dynamic", 0.5), case("dynamic", 1.0), case("async", 0.8), case("async", 1.25)])
    assert found == {"dynamic_ratio": 0.707, "async_ratio": 1.0, "missed": ["dynamic_ratio: 0.707, the goal is 1.0"]}


def test_the_two_ends_are_of_one_job_that_differs_in_nothing_else() -> None:
    learned, estimated = (hand_over.scenario_of(Case("async", 3, 0.002, end), 9) for end in ("learned", "estimated"))
    assert (learned.nodes, learned.costs.train_token_s, learned.jobs[0].steps) == (3, 0.002, 9)
    assert estimated.jobs[0].seeding_end == "estimated"
    same = estimated.jobs[0].model_copy(update={"seeding_end": "learned"})
    assert estimated.model_copy(update={"jobs": [same]}) == learned


@pytest.mark.long
def test_bench_hand_over_gives_a_ratio_of_every_case(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(hand_over, "MODES", ("async",))
    monkeypatch.setattr(hand_over, "REMOTE", (2,))
    monkeypatch.setattr(hand_over, "TRAIN_TOKEN_S", (0.002,))
    assert hand_over.main(["--json", "--steps", "6"]) == 0
    told = json.loads(capfd.readouterr().out)
    (one,) = told["cases"]
    assert one["ratio"] == pytest.approx(one["learned_s"] / one["estimated_s"], abs=1e-3)
    assert one["learned_s"] != one["estimated_s"], "else one of them was measured twice"
    assert told["async_ratio"] == one["ratio"]
