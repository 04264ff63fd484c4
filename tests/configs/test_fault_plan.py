"""Fault plans: what is right loads, what is wrong is refused by the field's name, and each kind says what it does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from configs.errors import ConfigError
from configs.fault_plan import (
    FORMS,
    KINDS,
    FaultBase,
    Kill,
    Target,
    dump_fault,
    fault_from_mapping,
    load_fault_plan,
)
from configs.fault_words import fault_from_words

TARGETS: dict[str, dict[str, Any]] = {
    "role": {"role": "rollout"},
    "name": {"name": "rollout-0"},
    "node": {"node": "node-1"},
    "link": {"link": ["head", "rollout-0"]},
    "chunk": {"chunk": {"index": 0}},
}


def refused(**fault: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        fault_from_mapping(fault)
    return str(caught.value)


def target_for(kind: type[FaultBase]) -> dict[str, Any]:
    form = kind.HITS[0]
    return {"role": kind.ROLES[0]} if form == "role" else TARGETS[form]


def test_the_vocabulary_is_the_documented_one() -> None:
    assert list(KINDS) == (
        "kill hang slow partition drop delay duplicate corrupt preempt disk_full clock out_of_memory".split()  # noqa: SIM905
    )


@pytest.mark.parametrize("kind", KINDS.values(), ids=list(KINDS))
def test_every_kind_says_what_it_does_to_a_real_and_to_a_simulated_run(kind: type[FaultBase]) -> None:
    doc = kind.__doc__ or ""
    assert "Real: " in doc
    assert "Simulated: " in doc


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("form", FORMS)
def test_a_kind_takes_the_targets_that_it_can_hit_and_refuses_the_others_by_name(kind: str, form: str) -> None:
    fits = form in KINDS[kind].HITS
    target = target_for(KINDS[kind]) if form == "role" and fits else TARGETS[form]
    if fits:
        assert fault_from_mapping({"kind": kind, "target": target}).target.form == form
    else:
        message = refused(kind=kind, target=target)
        assert "fault.target: " in message
        assert f"something that {kind} can hit" in message
        assert f"not a {form}" in message


def test_a_role_that_a_kind_cannot_hit_is_refused_by_name() -> None:
    message = refused(kind="slow", target={"role": "head"})
    assert "fault.target: " in message
    roles = "rollout, trainer, rank, weights, rewards, gateway, environments, train_service"
    assert f"a role that slow can hit: {roles}; not head" in message


@pytest.mark.parametrize(
    ("fault", "says"),
    [
        ({"kind": "kil", "target": TARGETS["role"]}, 'fault.kind: "kil" is not one of kill, hang'),
        ({"target": TARGETS["role"]}, "fault.kind: is missing"),
        ({"kind": "kill"}, "fault.target: is missing"),
        ({"kind": "kill", "target": {"rol": "rollout"}}, "Did you mean 'fault.target.role'?"),
        ({"kind": "kill", "target": {"role": "rolout"}}, 'fault.target.role: "rolout"'),
        ({"kind": "kill", "target": {}}, "exactly one of role, name, node, link, chunk; found none"),
        ({"kind": "kill", "target": TARGETS["role"] | TARGETS["name"]}, "found role and name"),
        ({"kind": "kill", "target": TARGETS["name"] | {"count": 2}}, "count to go with role only"),
        ({"kind": "kill", "target": TARGETS["role"], "heal_after_s": 1}, "fault.heal_after_s: there is no such key"),
        ({"kind": "kill", "target": TARGETS["role"], "times": 3}, "every_s beside times"),
        ({"kind": "kill", "target": TARGETS["role"], "every_s": 3}, "times beside every_s"),
        ({"kind": "kill", "target": TARGETS["role"], "at_s": -1}, "fault.at_s: -1 is not allowed"),
        ({"kind": "delay", "target": TARGETS["link"], "delay_ms": "3ms"}, "without quotes or a unit"),
        ({"kind": "delay", "target": TARGETS["link"], "delay_s": 3}, "Did you mean 'fault.delay_ms'?"),
        ({"kind": "drop", "target": TARGETS["link"], "probability": 0}, "fault.probability: 0 is not allowed"),
        ({"kind": "drop", "target": {"link": ["head", "head"]}}, "two different ends"),
        ({"kind": "clock", "target": TARGETS["name"], "jump_s": 0}, "fault.jump_s: 0 is not allowed"),
        ({"kind": "slow", "target": TARGETS["name"], "factor": 1}, "fault.factor: 1 is not allowed"),
    ],
)
def test_what_is_wrong_is_refused_with_the_fields_name(fault: dict[str, Any], says: str) -> None:
    assert says in refused(**fault)


def test_a_plan_file_names_the_line_of_what_is_wrong(tmp_path: Path) -> None:
    plan = tmp_path / "plan.yaml"
    plan.write_text(
        "seed: 3\nfaults:\n  - {kind: kill, target: {role: rollout}}\n  - kind: hang\n    target: {rle: x}\n"
    )
    with pytest.raises(ConfigError) as caught:
        load_fault_plan(plan)
    assert f"{plan}:5: faults.1.target.rle: there is no such key" in str(caught.value)


def test_a_plan_file_loads_with_its_faults_in_order(tmp_path: Path) -> None:
    plan = tmp_path / "plan.yaml"
    plan.write_text(
        "faults:\n  - {kind: disk_full, heal_after_s: 2}\n  - {kind: kill, target: {name: trainer}, after_step: 4}\n"
    )
    loaded = load_fault_plan(plan)
    assert [fault.kind for fault in loaded.faults] == ["disk_full", "kill"]
    assert loaded.faults[0].target.role == "scheduler"
    assert loaded.faults[1] == Kill(target=Target(name="trainer"), after_step=4)


def test_what_is_no_plan_is_told_what_a_plan_holds(tmp_path: Path) -> None:
    plan = tmp_path / "plan.yaml"
    plan.write_text("- kill\n")
    with pytest.raises(ConfigError, match="expected a mapping of seed and faults"):
        load_fault_plan(plan)


@pytest.mark.parametrize(
    ("words", "fault"),
    [
        (("kill", "rollout-0", None, []), {"kind": "kill", "target": {"name": "rollout-0"}}),
        (
            ("hang", "role=rollout", 2.5, ["target.count=2"]),
            {"kind": "hang", "target": {"role": "rollout", "count": 2}, "heal_after_s": 2.5},
        ),
        (
            ("delay", "link=head,trainer", 3.0, ["delay_ms=250", "lane=bulk"]),
            {
                "kind": "delay",
                "target": {"link": ["head", "trainer"]},
                "heal_after_s": 3.0,
                "delay_ms": 250.0,
                "lane": "bulk",
            },
        ),
        (("corrupt", "chunk=7", None, []), {"kind": "corrupt", "target": {"chunk": {"version": 7}}}),
        (("corrupt", "chunk=newest", None, []), {"kind": "corrupt", "target": {"chunk": {}}}),
        (("disk_full", None, 1.5, []), {"kind": "disk_full", "heal_after_s": 1.5}),
    ],
)
def test_a_fault_may_be_written_on_a_command_line(words: Any, fault: dict[str, Any]) -> None:
    assert fault_from_words(*words) == fault


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("kill", "link=a,b", None, []), "something that kill can hit"),
        (("kill", "rle=rollout", None, []), "fault.target.rle: there is no such key"),
        (("kill", None, None, []), "fault.target: is missing"),
        (("slow", "trainer", None, ["factr=3"]), "Did you mean 'fault.factor'?"),
        (("slow", "trainer", None, ["factor"]), "is not of the form a.b=value"),
    ],
)
def test_what_is_wrong_on_a_command_line_is_refused_by_the_fields_name(words: Any, says: str) -> None:
    with pytest.raises(ConfigError) as caught:
        fault_from_words(*words)
    assert says in str(caught.value)


@given(
    kind=st.sampled_from(list(KINDS)),
    at_s=st.none() | st.floats(0, 1e6),
    after_step=st.none() | st.integers(0, 10**6),
    times=st.integers(1, 5),
    heal_after_s=st.none() | st.floats(0.001, 1e6),
)
def test_a_fault_survives_the_way_to_a_plain_map_and_back(
    kind: str, at_s: float | None, after_step: int | None, times: int, heal_after_s: float | None
) -> None:
    values: dict[str, Any] = {"kind": kind, "target": target_for(KINDS[kind]), "at_s": at_s, "after_step": after_step}
    if times > 1:
        values |= {"times": times, "every_s": 2.5}
    if "heal_after_s" in KINDS[kind].model_fields:
        values["heal_after_s"] = heal_after_s
    fault = fault_from_mapping(values)
    assert type(fault) is KINDS[kind]
    assert fault_from_mapping(dump_fault(fault)) == fault
