"""Every day other schedules: a slice of seeds that nobody has looked at, as many as fit into 40 seconds each."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from configs.scenario import load_scenario
from supervisors.simulation.runner import simulate
from supervisors.simulation.seeds import replay_command
from tests.supervisors.simulation.scenarios import CHAOS_FILE, COMBINED_FILE, SEEDING_FILE

SEEDS_MAX, SEEDS_MIN = 400, 20
SLICE_S = 40.0
A_DAY_S = 86400


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("file", [CHAOS_FILE, SEEDING_FILE, COMBINED_FILE], ids=["chaos", "seeding", "combined"])
def test_no_seed_of_today_breaks_a_promise(file: Path) -> None:
    scenario, began_s = load_scenario(file), time.monotonic()
    first = int(time.time() // A_DAY_S) * 1000
    struck = seeds = 0
    for seed in range(first, first + SEEDS_MAX):
        outcome = simulate(scenario, seed)
        assert outcome.violations == [], f"{outcome.violations}\n{outcome.report}\n{replay_command(file, seed)}"
        struck += len(outcome.faults)
        seeds += 1
        if time.monotonic() - began_s > SLICE_S and seeds >= SEEDS_MIN:
            break
    assert struck > 2 * seeds, "faults that do not strike prove nothing"
