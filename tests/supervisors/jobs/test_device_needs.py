"""Who of a job is given a device, and what wants more of them than the machine has."""

from __future__ import annotations

from typing import Any

import pytest

from configs.errors import ConfigError
from configs.loader import job_from_mapping
from configs.services import ServiceConfig
from supervisors.jobs.device_needs import core_warnings, device_problems, devices_wanted, devices_wanted_by_service
from tests.smallest_job import smallest_job

MODEL = {"kind": "model", "path": "a/model"}
OWN_CODE = {"kind": "function", "function": "a.b:c"}


@pytest.mark.parametrize(
    ("sections", "role", "wanted"),
    [
        ({}, "trainer", 1),
        ({"trainer": {"device": "cpu"}}, "trainer", 0),
        ({"trainer": {"backend": "simulated"}}, "trainer", 0),
        ({"trainer": {"service": "train-0"}}, "trainer", 0),
        ({}, "rollout", 1),
        ({"rollout": {"device": "cuda"}}, "rollout", 1),
        ({"rollout": {"device": "cpu"}}, "rollout", 0),
        ({"rollout": {"engine": "simulated"}}, "rollout", 0),
        ({}, "ranker", 0),
        ({"rollout": {"ranker_device": "auto"}}, "ranker", 1),
        ({}, "rewards", 0),
        ({"reward": MODEL}, "rewards", 1),
        ({"reward": MODEL | {"device": "cpu"}}, "rewards", 0),
        ({"reward": OWN_CODE}, "rewards", None),
        ({"reward": [{"kind": "exact_match"}, OWN_CODE, MODEL | {"name": "m"}]}, "rewards", 1),
        ({}, "weights", 0),
        ({}, "gateway", 0),
        ({}, "environments", None),
    ],
)
def test_those_that_compute_are_given_one_and_the_users_own_code_sees_all(
    sections: dict[str, Any], role: str, wanted: int | None
) -> None:
    assert devices_wanted(smallest_job(**sections), role) == wanted


def test_a_training_service_is_given_one_as_a_trainer_is() -> None:
    assert devices_wanted_by_service(ServiceConfig(name="a", memory_bytes=1)) == 1
    assert devices_wanted_by_service(ServiceConfig(name="a", memory_bytes=1, device="cpu")) == 0
    assert devices_wanted_by_service(ServiceConfig(name="a", memory_bytes=1, backend="simulated")) == 0


def tensor_parallel(ranks: int, **cluster: Any) -> Any:
    rollout = {"engine": "vllm", "tensor_parallel": ranks}
    return smallest_job(rollout=rollout, cluster=cluster)


def test_more_ranks_than_the_machine_has_devices_are_refused_where_it_generates() -> None:
    (problem,) = device_problems(tensor_parallel(4), 2)
    assert problem == (
        "rollout.tensor_parallel",
        "4 ranks with a device each, but this machine has 2 for its processes",
        "Set it to at most 2, or let others generate (nodes)",
    )
    assert device_problems(tensor_parallel(2), 2) == []
    assert device_problems(tensor_parallel(4, nodes=1, place_rollout="remote"), 2) == []
    assert device_problems(tensor_parallel(4, nodes=1), 2) == []
    assert device_problems(tensor_parallel(4, place_rollout="elastic"), 2) != []


def test_more_trainer_ranks_than_the_machine_has_devices_are_refused_unless_they_compute_on_cores() -> None:
    trainer = {"backend": "fsdp", "ranks": 4}
    (problem,) = device_problems(smallest_job(trainer=trainer), 2)
    assert problem == (
        "trainer.ranks",
        "4 ranks with a device each, but this machine has 2 for its processes",
        "Set it to at most 2, or trainer.device to cpu",
    )
    assert device_problems(smallest_job(trainer=trainer), 4) == device_problems(smallest_job(trainer=trainer), 0) == []
    assert device_problems(smallest_job(trainer=trainer | {"device": "cpu"}), 2) == []


def test_ranks_of_replicas_on_other_machines_take_no_device_of_this_one() -> None:
    trainer = {"backend": "fsdp", "ranks": 8, "replicas": 2}
    job = smallest_job(trainer=trainer, cluster={"nodes": 1, "place_replicas": "remote"})
    assert device_problems(job, 4) == [] and core_warnings(job, 0, 4) == []
    (problem,) = device_problems(job, 2)
    assert problem[1:] == (
        "4 ranks with a device each, but this machine has 2 for its processes",
        "Set it to at most 4, or trainer.device to cpu",
    )


def test_ranks_on_a_machine_without_devices_compute_on_its_cores() -> None:
    assert device_problems(tensor_parallel(4), 0) == []


def test_more_ranks_than_cores_are_warned_of_where_they_compute_on_cores() -> None:
    job = smallest_job(trainer={"backend": "fsdp", "ranks": 4})
    assert core_warnings(job, 0, 2) == [
        "trainer.ranks: 4 ranks share 2 cores, which is slower than fewer ranks. Set it to at most 2, if the model fits"
    ]
    (warning,) = core_warnings(tensor_parallel(4), 0, 1)
    assert warning.startswith("rollout.tensor_parallel: 4 ranks share 1 core,")
    assert core_warnings(job, 0, 4) == core_warnings(job, 4, 2) == []
    assert core_warnings(tensor_parallel(4, nodes=1, place_rollout="remote"), 0, 2) == []
    on_cores = smallest_job(trainer={"backend": "fsdp", "ranks": 4, "device": "cpu"})
    assert len(core_warnings(on_cores, 4, 2)) == 1


@pytest.mark.parametrize("field", ["trainer", "rollout"])
def test_a_numbered_device_is_refused_with_what_to_do_instead(field: str) -> None:
    job = smallest_job().model_dump(mode="json", exclude_unset=True) | {field: {"device": "cuda:1"}}
    with pytest.raises(ConfigError) as refused:
        job_from_mapping(job, "job.yaml")
    assert (
        f'{field}.device: "cuda:1" is not one of auto, cpu, cuda: each process is given a device, and sees no other. '
        "Write cuda, and name the machine's devices with --devices 1," in str(refused.value)
    )
