"""Jobs with episodes, the whole system in virtual time: environments die, hang and are cut off from their scheduler."""

from __future__ import annotations

from typing import Any

import pytest

from actors.scheduler.episode_turns import EpisodeRow, NextTurn, Standing
from configs.scenario import Scenario, load_scenario
from supervisors.simulation.runner import Outcome, simulate
from tests.supervisors.simulation.scenarios import EPISODES_FILE, scenario

ROLES = ["environments", "environments", "gateway", "rollout", "trainer", "weights", "rewards", "head"]
KILLS = {"faults": [6, 10], "kinds": ["kill", "kill", "hang", "partition"], "roles": ROLES, "within_s": 25.0}


def game(faults: dict[str, Any] | None = None, **changes: Any) -> Scenario:
    fields = {
        "name": "a", "mode": "sync", "steps": 3, "turns_max": 4, "prompts_per_step": 3, "group_size": 3,
        "max_tokens": 40, "mean_tokens": 6, "environments": 2,
    }  # fmt: skip
    more = {} if faults is None else {"faults": {"random": faults}}
    return scenario(jobs=[fields | changes], **more)


def run(what: Scenario, seed: int) -> Outcome:
    outcome = simulate(what, seed)
    assert outcome.violations == [], "\n".join([*outcome.violations, outcome.report])
    return outcome


class Seen:
    def __init__(self) -> None:
        self.replayed = self.cut = 0


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> Seen:
    """What later lives of environments asked for: turns that stood there, and cuts because they had left the path."""
    noted, place = Seen(), EpisodeRow.place

    def noting(self: EpisodeRow, ask: Any) -> Any:
        found = place(self, ask)
        noted.replayed += isinstance(found, Standing) and ask.episode.attempt > 1
        noted.cut += isinstance(found, NextTurn) and found.cut
        return found

    monkeypatch.setattr(EpisodeRow, "place", noting)
    return noted


def test_the_same_is_learned_whoever_dies_in_mid_episode(seen: Seen) -> None:
    for seed in range(3):
        calm, disturbed = run(game(), seed), run(game(KILLS), seed)
        assert disturbed.faults
        assert disturbed.learned == calm.learned
    assert seen.replayed > 0
    assert seen.cut == 0


def test_environments_that_say_something_else_in_a_later_life_lose_no_token_uncounted(seen: Seen) -> None:
    for seed in range(3):
        run(game(KILLS, drift=0.8), seed)
    assert seen.cut > 0


@pytest.mark.parametrize("seed", range(4))
def test_drawn_faults_break_no_promise_of_episodes(seed: int) -> None:
    run(load_scenario(EPISODES_FILE), seed)


@pytest.mark.long
@pytest.mark.parametrize("seeds", [range(100 + 20 * i, 120 + 20 * i) for i in range(10)])
def test_many_drawn_faults_break_no_promise_of_episodes(seeds: range) -> None:
    for seed in seeds:
        run(load_scenario(EPISODES_FILE), seed)
