"""Jobs with a critic, the whole system in virtual time: no fault changes what they learn."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from configs.scenario import Scenario, SimulatedJob, load_scenario
from supervisors.simulation.runner import Outcome, simulate
from tests.supervisors.simulation.scenarios import ROOT, scenario

FILE = ROOT / "configs" / "critic.yaml"
KILLS = {"faults": [4, 6], "kinds": ["kill"], "within_s": 12.0, "at_messages": 0.5}


def run(critic: Scenario, seed: int = 5) -> Outcome:
    outcome = simulate(critic, seed)
    assert outcome.violations == [], "\n".join([*outcome.violations, outcome.report])
    return outcome


def job(faults: dict[str, Any] | None = None, **changes: Any) -> Scenario:
    fields = {"name": "a", "critic": True, "group_size": 1, "prompts_per_step": 4, "steps": 6, "checkpoint_every": 2}
    more = {} if faults is None else {"faults": {"random": faults}}
    served = {"services": load_scenario(FILE).services} if "service" in changes else {}
    return scenario(jobs=[fields | changes], **more, **served)


@pytest.mark.parametrize(
    ("role", "changes"), [("trainer", {}), ("train_service", {"service": "train-0"})], ids=["trainer", "service"]
)
def test_what_is_learned_with_a_critic_is_the_same_if_whoever_trains_is_killed(
    role: str, changes: dict[str, Any]
) -> None:
    calm, harmed = run(job(**changes)), run(job(KILLS | {"roles": [role]}, **changes))
    assert len(harmed.faults) >= 4
    assert harmed.learned == calm.learned
    assert calm.learned != run(job(**changes, critic=False, group_size=2)).learned


@pytest.mark.parametrize("seed", range(4))
def test_schedules_of_jobs_with_a_critic_break_no_promise(seed: int) -> None:
    run(load_scenario(FILE), seed)


def test_a_group_of_one_wants_a_critic() -> None:
    with pytest.raises(ValidationError, match="group_size: 2 or more, or critic: true"):
        SimulatedJob(name="a", group_size=1)
