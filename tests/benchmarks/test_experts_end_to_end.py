"""A tiny mixture of experts learns the quickstart's task, with router replay and without, and the distance is told."""

from __future__ import annotations

import json

import pytest

from benchmarks.jobs import experts


@pytest.mark.long
@pytest.mark.timeout(600)  # two runs of 40 steps, and a model that is made: a minute and a half on idle cores
def test_a_mixture_of_experts_learns_with_and_without_replay_and_replay_brings_trainer_and_engine_closer(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert experts.main(["--json", "--cores", "64", "--steps", "40", "--set", "model.warm_start_steps=600"]) == 0
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    for side in experts.SIDES:
        row = found["replay"][side]
        assert row["reward_last"] > row["reward_first"] + 0.3
        assert (row["lost"], row["twice"]) == (0, 0)
        assert row["expert_imbalance"][1] < row["expert_imbalance"][0]
    assert found["mismatch_ratio"] < 1.0
    with_routes, without = (found["replay"][side]["journal_bytes_per_token"] for side in ("with", "without"))
    assert without + 4 < with_routes < without + 20, "3 layers x 2 experts are 6 bytes a token"
