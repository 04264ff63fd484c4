"""Scenarios and planted bugs for the tests of simulations."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from configs.scenario import Scenario, Variant, load_scenario

ROOT = Path(__file__).parents[3]
CHAOS_FILE = ROOT / "configs" / "chaos.yaml"
SEEDING_FILE = ROOT / "configs" / "seeding.yaml"
SHARED_FILE = ROOT / "configs" / "shared_trainer.yaml"
PLANNED_FILE = ROOT / "configs" / "planned.yaml"
EPISODES_FILE = ROOT / "configs" / "episodes_sim.yaml"
COMBINED_FILE = ROOT / "configs" / "combined.yaml"


def chaos() -> Scenario:
    return load_scenario(CHAOS_FILE)


def rank_groups(**drawn: Any) -> Scenario:
    """That of the chaos file with trainers and workers of several ranks alone; ``drawn``: of its random faults."""
    whole = chaos()
    assert whole.faults.random is not None
    roles = {"roles": ["rank", "rank", "rank", "rollout", "trainer", "trainer", "weights", "node", "head"]}
    faults = whole.faults.model_copy(update={"random": whole.faults.random.model_copy(update=roles | drawn)})
    variants = [variant for variant in whole.variants if variant.ranks]
    return whole.model_copy(update={"faults": faults, "variants": variants})


def spread_ranks(**drawn: Any) -> Scenario:
    """The same with trainers whose ranks are divided over the head's machine and nodes."""
    variants = [{"ranks": 2, "trainer_nodes": 2}, {"ranks": 4, "trainer_nodes": 2}, {"ranks": 3, "trainer_nodes": 3}]
    roles = {"roles": ["rank", "rank", "rank", "trainer", "rollout", "node", "node", "node", "head"]}
    return rank_groups(**(roles | drawn)).model_copy(
        update={"variants": [Variant.model_validate(one) for one in variants], "nodes": 3}
    )


def scenario(**changes: Any) -> Scenario:
    """One small sync job on the head's machine, without faults."""
    values: dict[str, Any] = {"name": "small", "jobs": [{"name": "a", "steps": 3}], "nodes": 0, "stall_s": 45}
    return Scenario.model_validate(values | changes)


def calm(busy: Scenario) -> Scenario:
    """The same without faults."""
    return busy.model_copy(update={"faults": scenario().faults})


class Plant:
    """Replaces a function for as long as the test runs: a planted bug."""

    def __init__(self, setattr_: Callable[..., None]) -> None:
        self.replace = setattr_
