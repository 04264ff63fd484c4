"""A trainer with a replica, or a part of its one copy, on another node, in real runs that are harmed: what it learns is
the same, bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from rank_runs import assert_alike, hit, job_of, parts

from supervisors.testing.run_under_test import HeadraceRun
from tests.free_ports import free_ports

StartRun = Callable[..., HeadraceRun]


def here(model: Path, **trainer: Any) -> dict[str, Any]:
    """Two ranks with a copy of the weights each, on one machine, and simulated engines."""
    return job_of(model, simulated=True, replicas=2, **trainer)


def apart(job: dict[str, Any], join: str) -> dict[str, Any]:
    """The same with the second copy on a node; workers stay on the head's machine."""
    cluster = {"nodes": 1, "place_rollout": "local", "place_replicas": "remote", "listen": join}
    return job | {"cluster": cluster}


def places(run: HeadraceRun) -> list[str]:
    """Where the replicas of the trainer have been, one life after another."""
    return [row["nodes"] for row in run.events("replicas_placed")]


@pytest.fixture
def join() -> str:
    return f"tcp://127.0.0.1:{free_ports()}"


@pytest.mark.long
@pytest.mark.timeout(400)
def test_a_rank_on_a_node_is_killed_and_then_the_node_and_nothing_is_learned_otherwise(
    headrace_run: StartRun, small_model: Path, join: str
) -> None:
    job = here(small_model) | {"steps": 20}
    alone = headrace_run(job, name="alone")
    alone.finish()
    harmed = headrace_run(apart(job, join), name="harmed", faults=[hit("kill", "trainer.rank1", 2)])
    harmed.add_node("one", join)
    harmed.wait_until("the second life", lambda: places(harmed) == ["one", "one"])
    harmed.add_node("two", join)
    harmed.wait_for_step(6)
    harmed.nodes["one"].kill()
    assert_alike(harmed, alone, 1)
    assert places(harmed) == ["one", "one", "two"]
    counted = [event["child"] for event in harmed.events("child_restarting")]
    assert len(counted) == 2, f"one restart for the rank, and one for the node: {counted}"


@pytest.mark.long
@pytest.mark.timeout(400)
def test_a_node_that_is_to_go_is_left_at_no_cost_and_a_trainer_without_a_node_waits_and_says_so(
    headrace_run: StartRun, small_model: Path, join: str
) -> None:
    job = here(small_model) | {"steps": 60}
    alone = headrace_run(job, name="alone")
    alone.finish()
    harmed = headrace_run(apart(job, join), name="harmed")
    harmed.add_node("one", join)
    harmed.wait_for_step(3)
    assert harmed.call("drain", {"target": "one"})
    harmed.wait_for_step(6)
    assert places(harmed) == ["one"], "no other node has room"
    harmed.add_node("two", join)
    harmed.wait_until("the move", lambda: places(harmed) == ["one", "two"])
    assert not harmed.events("child_restarting")
    harmed.wait_for_step(9)
    harmed.nodes["two"].terminate()
    stall = harmed.wait_until(
        "a trainer that waits",
        lambda: [row for row in harmed.call("stalls", {"longer_than_s": 0.5}) if row["waiter"] == "trainer"],
    )[0]
    assert stall["waits_for"].startswith("a node with 1 free slot for rank 1; one is draining")
    harmed.call("undrain", {"target": "one"})
    assert_alike(harmed, alone, 0)
    assert places(harmed) == ["one", "two", "one"]
    counted = harmed.events("child_restarting")  # who hears first that the node ends its rank: the trainer, or the head
    assert len(counted) <= 1, counted
    exits = [row["detail"] for row in harmed.events("child_exited") if row["cause"] == "crashed"]
    assert all("RankLost: trainer.rank1 is lost: stopped" in detail for detail in exits), exits


@pytest.mark.long
@pytest.mark.timeout(400)
def test_the_heads_next_life_adopts_a_replica_on_a_node(headrace_run: StartRun, small_model: Path, join: str) -> None:
    job = here(small_model) | {"steps": 40}
    alone = headrace_run(job, name="alone")
    alone.finish()
    faults = [{"kind": "kill", "target": {"role": "head"}, "after_step": 5, "at_s": 0.1}]
    harmed = headrace_run(apart(job, join), name="harmed", faults=faults)
    harmed.add_node("one", join)
    assert_alike(harmed, alone, 1)
    assert {"trainer", "trainer.rank1"} <= {event["child"] for event in harmed.events("child_adopted")}
    assert places(harmed) == ["one", "one"]


@pytest.mark.timeout(300)
def test_one_copy_over_two_machines_learns_what_one_machine_does_though_a_rank_is_killed(
    headrace_run: StartRun, small_model: Path, join: str
) -> None:
    job = job_of(small_model, simulated=True) | {"steps": 8}
    alone = headrace_run(job, name="alone")
    alone.finish()
    cluster = {"nodes": 1, "place_rollout": "local", "listen": join}
    spanning = job_of(small_model, simulated=True, nodes=2) | {"steps": 8, "cluster": cluster}
    harmed = headrace_run(spanning, name="harmed", faults=[hit("kill", "trainer.rank1", 2)])
    harmed.add_node("one", join)
    assert_alike(harmed, alone, 1)
    assert places(harmed) == ["one", "one"]
    assert [event["child"] for event in harmed.events("child_restarting")] == ["trainer.rank1"]


@pytest.mark.long
@pytest.mark.timeout(400)
def test_one_copy_over_three_machines_is_gone_on_with_on_one(
    headrace_run: StartRun, small_model: Path, join: str
) -> None:
    job = job_of(small_model, simulated=True, ranks=3, nodes=3) | {"steps": 6}
    job |= {"cluster": {"nodes": 2, "place_rollout": "local", "listen": join}}
    run = headrace_run(job, name="run")
    for name in ("one", "two"):
        run.add_node(name, join)
    held = parts(run.finish())
    assert set(places(run)[0].split(",")) == {"one", "two"} and len(places(run)) == 1
    assert sum(name.startswith("trainer/shard-") for name in held) == 3
    run.resume(
        settings=["steps=8", "trainer.ranks=1", "trainer.nodes=1", "cluster.nodes=0", "cluster.place_rollout=spread"]
    )
    held = parts(run.finish())
    assert len(run.rows()) == 8
    assert sum(name.startswith("trainer/shard-") for name in held) == 1
