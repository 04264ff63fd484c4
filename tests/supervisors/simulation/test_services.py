"""Training services under virtual time: what is done to them costs time, and changes nothing of what jobs come to."""

from __future__ import annotations

from typing import Any

import pytest

from configs.scenario import FaultsConfig, RandomFaults, Scenario
from supervisors.simulation.runner import simulate
from tests.supervisors.simulation.scenarios import calm, scenario

SERVICE = {"name": "train-0", "backend": "simulated", "device": "cpu", "threads": 1, "memory_bytes": 2400}
JOBS = [{"name": name, "steps": 3, "service": "train-0", "max_tokens": 8} for name in ("a", "b")]


def shared(*faults: dict[str, Any], **service: Any) -> Scenario:
    """Two jobs on one service, which has room for the state of one."""
    services = {"services": [SERVICE | service]}
    return scenario(jobs=JOBS, services=services, costs={"moved_byte_s": 0.00004}, faults={"plan": list(faults)})


def on_service(kind: str, **fault: Any) -> dict[str, Any]:
    return {"kind": kind, "target": {"role": "train_service"}, "at_s": 1.4} | fault


def test_jobs_that_share_a_service_finish_and_come_to_what_they_come_to_alone() -> None:
    outcome = simulate(shared(), 1)
    assert (outcome.violations, outcome.faults) == ([], [])


def test_equal_seeds_give_equal_hashes_with_services_too() -> None:
    busy = shared(on_service("kill"), on_service("disk_full", heal_after_s=2.0), disk_bytes=8192)
    first, again = simulate(busy, 5), simulate(busy, 5)
    assert (again.hash, again.events, again.faults) == (first.hash, first.events, first.faults)
    assert simulate(calm(busy), 5).hash != first.hash


@pytest.mark.parametrize(
    "fault",
    [
        on_service("kill", times=3, every_s=2.3),
        on_service("hang", heal_after_s=4.0),
        on_service("slow", factor=8.0, heal_after_s=4.0),
        on_service("preempt", notice_s=0.0, grace_s=2.0),
        on_service("partition", heal_after_s=5.0),
        {"kind": "kill", "target": {"role": "head"}, "at_s": 2.0},
        {"kind": "kill", "target": {"node": "head"}, "at_s": 2.5},
        {"kind": "kill", "target": {"role": "trainer"}, "at_s": 1.5, "times": 2, "every_s": 1.7},
    ],
    ids=lambda fault: f"{fault['kind']} {next(iter(fault['target'].values()))}",
)
def test_no_fault_in_mid_run_changes_what_jobs_come_to(fault: dict[str, Any]) -> None:
    outcome = simulate(shared(fault, disk_bytes=8192), 2)
    assert outcome.violations == [], outcome.report
    assert outcome.faults and "nothing" not in outcome.faults[0]


def test_full_tiers_cost_lives_of_bundles_and_no_promise() -> None:
    """While neither takes anything, whoever would have to make room cannot, and the other job has no slice."""
    outcome = simulate(shared(on_service("disk_full", heal_after_s=6.0), host_bytes=8192, disk_bytes=8192), 3)
    assert outcome.violations == [], outcome.report
    assert "tier" in outcome.faults[0]


def test_a_job_that_waits_for_a_place_gets_it_under_the_next_life_of_the_head() -> None:
    killed = RandomFaults(faults=(1, 1), kinds=["kill"], roles=["head"], within_s=4.0, at_messages=0.0)
    waits = shared(jobs_max=1).model_copy(update={"faults": FaultsConfig(random=killed)})
    told: list[str] = []
    outcome = simulate(waits, 4, told.append)
    assert outcome.violations == [], outcome.report

    def at(*words: str) -> list[int]:
        return [number for number, line in enumerate(told) if all(word in line for word in words)]

    places = at("a job has a place on a service", "job=")
    assert len(places) == 2, "each once: the one that had a place kept it"
    assert places[0] < at("fault ", "kind=kill")[0] < places[1]


def test_a_head_that_dies_before_it_has_noted_its_services_is_followed_by_one_that_has_them() -> None:
    killed = RandomFaults(faults=(1, 1), kinds=["kill"], roles=["head"], within_s=0.2, at_messages=0.0)
    outcome = simulate(shared().model_copy(update={"faults": FaultsConfig(random=killed)}), 0)
    assert "kill role head: head" in outcome.faults[0]
    assert outcome.violations == [], outcome.report
