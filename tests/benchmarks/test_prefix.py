"""``headrace bench prefix``: what it makes of rows, and a real run of it that is as short as it can be."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.jobs import prefix


def row(prefilled: int, hits: int, distinct: int) -> dict[str, int]:
    return {"prefilled_tokens": prefilled, "prefix_hit_tokens": hits, "distinct_prefix_tokens": distinct}


def found_of(prefilled: int, hits: int, distinct: int, lost: int = 0) -> dict[str, Any]:
    return prefix.figures([row(prefilled, hits, distinct)] * 2) | {"prompts_lost": lost, "samples_trained_twice": 0}


def test_figures_are_means_of_steps_and_their_ratios() -> None:
    assert prefix.figures([row(100, 200, 90), row(120, 200, 110)]) == {
        "prefilled_tokens": 110, "distinct_tokens": 100, "unshared_tokens": 310, "of_unshared": 0.355, "ratio": 1.1,
    }  # fmt: skip


def test_each_run_is_held_against_its_own_goal_and_nothing_may_be_lost() -> None:
    assert prefix.judged(found_of(36, 64, 30), found_of(110, 900, 100))["missed"] == []
    found = prefix.judged(found_of(37, 63, 37), found_of(111, 900, 100, lost=2))
    assert [line.split(":")[0] for line in found["missed"]] == ["groups", "system", "system"]
    assert (found["prefilled_tokens"], found["distinct_tokens"], found["ratio"]) == (111, 100, 1.11)


def test_a_system_prompt_has_as_many_characters_as_it_is_to_have_tokens() -> None:
    assert [len(prefix.system_prompt(tokens)) for tokens in (10, 200)] == [10, 200]


@pytest.mark.long
@pytest.mark.timeout(300)  # seconds on an idle machine, minutes on a busy one
def test_bench_prefix_reaches_its_goals_on_real_processes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert prefix.main(["--json", "--check", "--steps", "3", "--cores", "64", "--keep", str(tmp_path)]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["missed"] == []
    assert found["distinct_tokens"] < found["prefilled_tokens"] < found["unshared_tokens"]
    assert (tmp_path / "system" / "metrics.jsonl").exists()
