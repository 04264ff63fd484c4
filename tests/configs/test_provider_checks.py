"""What contradicts itself about a provider is said in one sentence each, with the field, before anything starts."""

from __future__ import annotations

from typing import Any

import pytest

from configs.checks.provider_checks import check_provider
from configs.checks.scheduling_checks import check_scheduling
from configs.loader import load_job
from tests.smallest_job import smallest_job

PLANNED: dict[str, Any] = {"policy": "planned", "workers_max": 4}
FUNCTIONS: dict[str, Any] = {
    "rollout": {"max_tokens": 8, "workers": 1, "length_ranking": "history"},
    "scheduling": PLANNED,
    "cluster": {"place_rollout": "elastic"},
    "provider": {"kind": "functions"},
}
ASSIGNED = {"scheduling": {"policy": "assign", "workers_max": 4}}


def found(**sections: Any) -> dict[str, str]:
    return {field: wrong for field, wrong, _ in check_provider(smallest_job(**{**FUNCTIONS, **sections}))}


def test_a_job_with_functions_is_let_through() -> None:
    assert found() == {}
    assert found(provider={"kind": "functions", "idle_s": 0.0, "asleep_price": 1.0, "bill_rounding_s": 60.0}) == {}


@pytest.mark.parametrize(
    ("sections", "field", "says"),
    [
        ({"cluster": {"place_rollout": "local"}}, "cluster.place_rollout", "local, but provider.kind is functions"),
        ({"provider": {"kind": "functions", "machines": "slurm"}}, "cluster.listen", "from the head's machine only"),
        ({"provider": {"kind": "functions", "slurm": {"partition": "a"}}}, "provider.slurm", "is set, but"),
        ({"provider": {"kind": "functions", "slots": 2}}, "provider.slots", "2, but"),
        ({"provider": {"kind": "functions", "trace": "a.csv"}}, "provider.trace", "is set, but provider.kind is func"),
        ({"provider": {"kind": "local", "trace": __file__, "idle_s": 1.0}}, "provider.idle_s", "kind is local"),
        ({"provider": {"asleep_price": 0.5}}, "provider.asleep_price", "is set, but provider.kind is none"),
        ({"provider": {"slots": 2}}, "provider.slots", "is set, but provider.kind is none"),
        (ASSIGNED, "scheduling.policy", "assign, but provider.kind is functions"),
        (ASSIGNED | {"sync": {"mode": "async"}}, "sync.mode", "async, but provider.kind is functions"),
        (ASSIGNED | {"sync": {"mode": "one_step_barrier"}}, "sync.mode", "one_step_barrier, but provider.kind is func"),
        ({"scheduling": {"seeding": True}}, "scheduling.seeding", "is set, but provider.kind is functions"),
        ({"rollout": {"max_tokens": 8, "workers": 4}}, "rollout.workers", "4 leaves no function"),
    ],
)
def test_what_functions_cannot_be_is_refused_by_name(sections: dict[str, Any], field: str, says: str) -> None:
    assert says in found(**sections)[field]


def test_fewer_workers_at_most_than_at_least_are_refused() -> None:
    job = smallest_job(**{**FUNCTIONS, "scheduling": PLANNED | {"workers_min": 5}})
    assert "scheduling.workers_max" in {field for field, _, _ in check_scheduling(job)}


SLURM: dict[str, Any] = {
    "cluster": {"place_rollout": "elastic", "listen": "tcp://0.0.0.0:7001"},
    "provider": {"kind": "slurm", "nodes_max": 4, "notice_s": 30.0, "slots": 2},
}


def with_slurm(**slurm: Any) -> dict[str, Any]:
    return {"provider": SLURM["provider"] | {"slurm": slurm}}


def test_the_preset_of_slurm_and_jobs_like_it_are_let_through() -> None:
    assert load_job("slurm").provider.slurm.time_limit == "4:00:00"
    for limit in ("30", "90:00", "4:00:00", "2-12", "2-12:30", "2-12:30:00", "UNLIMITED", "0"):
        job = smallest_job(**SLURM | with_slurm(time_limit=limit, sbatch=["--gres=gpu:4", "-C h100 --mem=0"]))
        assert check_provider(job) == []


@pytest.mark.parametrize(
    ("sections", "field", "says"),
    [
        ({"cluster": {"place_rollout": "spread", "listen": "tcp://0.0.0.0:1"}}, "cluster.place_rollout", "no workers"),
        ({"cluster": {"place_rollout": "elastic"}}, "cluster.listen", "is reached from the head's machine only"),
        ({"provider": {"kind": "slurm"}}, "provider.nodes_max", "is missing, and provider.kind is slurm"),
        ({"provider": SLURM["provider"] | {"trace": "a.csv"}}, "provider.trace", "is set, but provider.kind is slurm"),
        ({"provider": {"slurm": {"account": "lab"}}}, "provider.slurm", "is set, but provider.kind is none"),
        (with_slurm(time_limit="4h"), "provider.slurm.time_limit", "'4h' is no time limit of Slurm"),
        (with_slurm(time_limit="1:x"), "provider.slurm.time_limit", "'1:x' is no time limit of Slurm"),
        (
            with_slurm(time_limit="0:10"),
            "provider.slurm.time_limit",
            "0:10 is over as it begins: machines are told to go 40 s before its end",
        ),
        (with_slurm(sbatch=["-M other"]), "provider.slurm.sbatch", "-M is set by Headrace"),
        (with_slurm(sbatch=["--clusters=a,b"]), "provider.slurm.sbatch", "--clusters=a,b is set by Headrace"),
        (with_slurm(sbatch=["#SBATCH --gres=gpu:4"]), "provider.slurm.sbatch", "is no option of sbatch"),
        (with_slurm(sbatch=["--mem=0 -N 4"]), "provider.slurm.sbatch", "-N is set by Headrace"),
        (with_slurm(sbatch=["--comment=mine"]), "provider.slurm.sbatch", "--comment=mine is set by Headrace"),
        (with_slurm(sbatch=["--gres='gpu:4"]), "provider.slurm.sbatch", "cannot be read: No closing quotation"),
    ],
)
def test_what_a_slurm_cannot_be_asked_is_refused_by_name(sections: dict[str, Any], field: str, says: str) -> None:
    job = smallest_job(**SLURM | sections)
    assert says in {found: wrong for found, wrong, _ in check_provider(job)}[field]
