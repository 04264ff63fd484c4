"""The comparison with TRL, without TRL: when a reward counts as reached, and what TRL is told."""

from __future__ import annotations

import json
from typing import Any

import pytest

from benchmarks._processes import ROOT
from benchmarks.peers.long_tail import WIDTH, write_rows
from benchmarks.peers.trl_grpo import TASKS, compare, task_data, time_to_reward
from benchmarks.peers.trl_worker import trl_settings
from configs.loader import load_job


def steps(*rewards: float, each_s: float = 2.0) -> list[dict[str, Any]]:
    return [{"seconds": each_s * (i + 1), "reward_mean": reward} for i, reward in enumerate(rewards)]


def test_a_reward_is_reached_at_the_end_of_the_first_window_whose_mean_reaches_it():
    assert time_to_reward(steps(0.2, 0.8, 1.0, 1.0), 0.9, window=2) == (2, 6.0)


def test_one_lucky_step_is_not_enough():
    assert time_to_reward(steps(0.2, 1.0, 0.2, 0.3), 0.9, window=2) is None


def test_fewer_steps_than_the_window_reach_nothing():
    assert time_to_reward(steps(1.0), 0.9, window=2) is None


def test_the_comparison_says_how_many_times_shorter_ours_is():
    found = compare(steps(*[1.0] * 6, each_s=1.0), steps(*[1.0] * 6, each_s=3.0), 0.9)
    assert found["times_shorter"] == pytest.approx(3.0)


def test_a_side_that_never_gets_there_leaves_no_ratio():
    found = compare(steps(*[1.0] * 6), steps(*[0.1] * 6), 0.9)
    assert found["trl_seconds"] is None
    assert found["times_shorter"] is None


@pytest.mark.parametrize("task", TASKS)
def test_trl_gets_the_jobs_own_batch_and_rates(task, tmp_path):
    job = load_job(TASKS[task], task_data(task, tmp_path))
    settings = trl_settings(job, 7, "scratch")
    assert settings["per_device_train_batch_size"] == job.algorithm.prompts_per_step * job.algorithm.group_size
    assert settings["num_generations"] == job.algorithm.group_size
    assert settings["max_completion_length"] == job.rollout.max_tokens
    assert settings["learning_rate"] == job.trainer.lr
    assert settings["max_steps"] == 7


def test_the_jobs_of_the_comparison_lie_in_the_repository():
    assert all(file.is_relative_to(ROOT) for file in TASKS.values())


def test_the_long_tailed_task_has_few_long_answers_and_prompts_of_one_length(tmp_path):
    write_rows(tmp_path / "rows.jsonl", rows=2000)
    rows = [json.loads(line) for line in (tmp_path / "rows.jsonl").read_text().splitlines()]
    lengths = sorted(len(row["answer"]) for row in rows)
    assert {len(row["prompt"]) for row in rows} == {WIDTH}
    assert lengths[1000] <= 9 and lengths[1900] >= 20 and lengths[-1] == WIDTH
    assert all(row["prompt"].rstrip(".").upper() == row["answer"] for row in rows)
