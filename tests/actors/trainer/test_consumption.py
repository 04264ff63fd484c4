"""What is trained together: the plan of each mode, and what an inbox does with a threshold of tokens."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from actors.trainer.batching import Inbox, tokens_of
from actors.trainer.consumption import Consumption, consumption
from configs.schema import JobConfig
from tests.actors.trainer.trainer_world import grant
from tests.smallest_job import smallest_job


def job(mode: str, **trainer: Any) -> JobConfig:
    return smallest_job(algorithm={"prompts_per_step": 32}, sync={"mode": mode}, trainer=trainer)


@pytest.mark.parametrize(
    ("mode", "configured", "plan"),
    [
        ("sync", 0, Consumption(32, in_order=True)),
        ("minibatch", 0, Consumption(8, in_order=True)),
        ("minibatch", 5, Consumption(5, in_order=True)),
        ("one_step_barrier", 0, Consumption(32, in_order=True)),
        ("async", 0, Consumption(8, in_order=False)),
        ("async", 5, Consumption(5, in_order=False)),
    ],
)
def test_the_plan_follows_from_the_mode(mode: str, configured: int, plan: Consumption) -> None:
    assert consumption(job(mode, window_prompts=configured), 0) == plan


@pytest.mark.parametrize("mode", ["sync", "one_step_barrier", "async"])
def test_the_window_of_ppo_is_the_step_and_waits_for_prompts_that_nobody_expected(mode: str) -> None:
    algorithm = {"name": "ppo", "prompts_per_step": 2}
    plan = consumption(smallest_job(algorithm=algorithm, sync={"mode": mode}), 0)
    inbox = Inbox(step=0, expected=range(2), plan=plan)
    assert inbox.add(grant(0, 1))
    assert inbox.add(grant(0, 0))
    assert inbox.ready() == []
    assert inbox.add(grant(0, 7))
    inbox.close(3)
    assert [[group.prompt for group in window] for window in inbox.ready()] == [[0, 1, 7]]
    assert inbox.exhausted
    assert inbox.ready() == []


def test_dynamic_begins_with_a_full_device_or_a_quarter_of_the_step_before() -> None:
    assert consumption(job("dynamic", saturation_tokens=700), 99).saturation_tokens == 700
    assert consumption(job("dynamic"), 0).saturation_tokens == 16_384
    assert consumption(job("dynamic"), 4_000).saturation_tokens == 1_000
    assert consumption(job("dynamic"), 10**6).saturation_tokens == 16_384


def test_with_a_threshold_of_tokens_all_that_has_arrived_is_taken_once_it_is_enough_and_the_rest_at_the_end() -> None:
    groups = [grant(0, prompt) for prompt in range(6)]
    enough = tokens_of(groups[:2])
    inbox = Inbox(step=0, expected=range(6), plan=Consumption(1, in_order=False, saturation_tokens=enough))
    inbox.add(groups[1])
    assert inbox.ready() == []
    for group in (groups[0], groups[4]):
        inbox.add(group)
    assert [[g.prompt for g in window] for window in inbox.ready()] == [[0, 1, 4]]
    inbox.add(groups[2])
    assert inbox.ready() == []
    inbox.add(groups[3])
    inbox.add(groups[5])
    assert [[g.prompt for g in window] for window in inbox.ready()] == [[2, 3, 5]], "the last that is expected"


def test_tokens_are_those_of_prompts_and_responses_of_all_siblings() -> None:
    group = grant(0, 1)
    assert tokens_of([group]) == int(np.sum(group.lengths)) + 2 * len(group.prompt_ids)
