"""What a target means: names, roles, nodes and both ends of links, and a sentence for what is not there."""

from __future__ import annotations

import random

import pytest

from configs.fault_plan import Target
from supervisors.nemesis.fault_targets import Roster, Victim, beside
from supervisors.tree.errors import FaultNotPossible
from transport.address import ActorAddress, PeerId


def victim(name: str, role: str, node: str = "head") -> Victim:
    peer = name if role in ("head", "node") else f"{node}.j.{name}"
    there = beside(ActorAddress("agent", PeerId(node, 1)))
    return Victim(name, role, node, 100, peer, there, ActorAddress("reporter", PeerId(peer, 1)))


ROSTER = Roster(
    [
        victim("head", "head"),
        victim("mars", "node", "mars"),
        victim("trainer", "trainer"),
        victim("rollout-0", "rollout"),
        victim("rollout-1", "rollout", "mars"),
    ],
    frozenset({"trainer", "rollout-0", "rollout-1", "rollout-2", "weights"}),
)


def names(target: Target, seed: int = 0) -> list[str]:
    return [v.name for v in ROSTER.victims(target, random.Random(seed))]


def test_a_name_a_role_and_a_node_mean_what_runs_under_them() -> None:
    assert names(Target(name="rollout-1")) == ["rollout-1"]
    assert names(Target(name="head")) == names(Target(role="head")) == ["head"]
    assert names(Target(node="mars")) == names(Target(role="node")) == ["mars"]
    assert sorted(names(Target(role="rollout", count=9))) == ["rollout-0", "rollout-1"]


def test_one_of_a_role_is_drawn_by_the_seed() -> None:
    drawn = [names(Target(role="rollout"), seed) for seed in range(20)]
    assert {name for [name] in drawn} == {"rollout-0", "rollout-1"}
    assert drawn == [names(Target(role="rollout"), seed) for seed in range(20)]


def test_who_is_known_but_does_not_run_is_waited_for() -> None:
    assert names(Target(name="rollout-2")) == names(Target(name="weights")) == names(Target(role="rewards")) == []


@pytest.mark.parametrize(
    ("target", "says"),
    [
        (Target(name="rollout-7"), "there is no process 'rollout-7'; there are: .*rollout-2"),
        (Target(name="mars"), "there is no process 'mars'"),
        (Target(node="head"), "the whole run would end: take role head"),
        (Target(role="train_service"), "training services serve several runs: they are hit in simulations only"),
        (Target(node="venus"), "there is no node 'venus'; there are: head, mars"),
        (Target(node="trainer"), "there is no node 'trainer'"),
        (Target(name="scheduler"), "scheduler lives in the head's process: take role head"),
        (Target(name="job.small"), "lives in the head's process"),
    ],
)
def test_what_is_not_there_is_said(target: Target, says: str) -> None:
    with pytest.raises(FaultNotPossible, match=says):
        names(target)


def test_without_other_nodes_none_can_be_hit() -> None:
    with pytest.raises(FaultNotPossible, match="no other node has joined"):
        Roster([victim("head", "head")], frozenset()).victims(Target(role="node"), random.Random(0))


@pytest.mark.parametrize(
    ("link", "one", "other"),
    [
        (("head", "rollout-0"), ["head"], ["rollout-0"]),
        (("scheduler", "rollout-1"), ["head"], ["rollout-1"]),
        (("rollout", "trainer"), ["rollout-0", "rollout-1"], ["trainer"]),
        (("mars", "head"), ["mars"], ["head"]),
        (("trainer", "weights"), ["trainer"], []),
    ],
)
def test_the_ends_of_a_link(link: tuple[str, str], one: list[str], other: list[str]) -> None:
    ends = ROSTER.ends(link)
    assert [[v.name for v in end] for end in ends] == [one, other]


def test_a_link_within_one_process_is_none() -> None:
    with pytest.raises(FaultNotPossible, match="are one process here"):
        ROSTER.ends(("head", "metrics"))
