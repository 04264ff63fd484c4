"""Schedules of the shipped scenarios: a few that are always the same, and for long runs those of the day.

The day's are seeds that nobody has looked at, as many as fit into 40 seconds each.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from pathlib import Path

import pytest

from configs.scenario import load_scenario
from supervisors.simulation.runner import simulate
from supervisors.simulation.seeds import replay_command
from tests.supervisors.simulation.scenarios import CHAOS_FILE, COMBINED_FILE, PLANNED_FILE, SEEDING_FILE, SHARED_FILE

SEEDS = 6
FRESH_MAX, FRESH_MIN = 400, 20
SLICE_S = 40.0
A_DAY_S = 86400

each_file = pytest.mark.parametrize(
    "file", [CHAOS_FILE, SEEDING_FILE, COMBINED_FILE], ids=["chaos", "seeding", "combined"]
)


def no_promise_is_broken(file: Path, seeds: Iterable[int]) -> None:
    scenario, struck, count = load_scenario(file), 0, 0
    for seed in seeds:
        outcome = simulate(scenario, seed)
        assert outcome.violations == [], f"{outcome.violations}\n{outcome.report}\n{replay_command(file, seed)}"
        struck += len(outcome.faults)
        count += 1
    assert struck > 2 * count, "faults that do not strike prove nothing"


@each_file
def test_no_fixed_seed_breaks_a_promise(file: Path) -> None:
    no_promise_is_broken(file, range(SEEDS))


def seeds_of_today() -> Iterable[int]:
    first, began_s = int(time.time() // A_DAY_S) * 1000, time.monotonic()
    for number in range(FRESH_MAX):
        if number < FRESH_MIN or time.monotonic() - began_s < SLICE_S:
            yield first + number


def test_no_fixed_seed_of_jobs_that_share_a_trainer_breaks_a_promise() -> None:
    no_promise_is_broken(SHARED_FILE, range(4))  # twice as dear: each is held against the jobs alone


def test_no_fixed_seed_of_jobs_with_planned_steps_breaks_a_promise() -> None:
    no_promise_is_broken(PLANNED_FILE, range(6))


@pytest.mark.long
@pytest.mark.timeout(300)
def test_no_seed_of_today_of_jobs_with_planned_steps_breaks_a_promise() -> None:
    no_promise_is_broken(PLANNED_FILE, seeds_of_today())


@pytest.mark.long
@pytest.mark.timeout(300)
def test_no_seed_of_today_of_jobs_that_share_a_trainer_breaks_a_promise() -> None:
    no_promise_is_broken(SHARED_FILE, seeds_of_today())


@pytest.mark.long
@pytest.mark.timeout(300)
@each_file
def test_no_seed_of_today_breaks_a_promise(file: Path) -> None:
    no_promise_is_broken(file, seeds_of_today())
