"""The services file: what is wrong with it, and with a job that names a service, is said in one sentence."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from configs.errors import ConfigError
from configs.loader import load_job
from configs.services import ServicesConfig, load_services, problems_with, service_from_mapping
from tests.smallest_job import smallest_job

SHARED = Path(__file__).parents[2] / "configs" / "shared"
SERVICE: dict[str, Any] = {"name": "train-0", "threads": 1, "memory_bytes": 1000}


def written(tmp_path: Path, **content: Any) -> Path:
    path = tmp_path / "services.yaml"
    path.write_text(yaml.safe_dump(content, sort_keys=False), encoding="utf-8")
    return path


def services(tmp_path: Path, *changes: dict[str, Any]) -> ServicesConfig:
    return load_services(written(tmp_path, services=[SERVICE | change for change in changes or ({},)]))


def test_the_shipped_files_go_together() -> None:
    shared = load_services(SHARED / "services.yaml")
    for name in ("first", "second"):
        assert problems_with(load_job(SHARED / f"{name}.yaml"), shared) == []


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"memory_byte": 1}, "services.0.memory_byte: there is no such key. Did you mean 'services.0.memory_bytes'?"),
        ({"queue": {"policy": "hrs"}}, 'services.0.queue.policy: "hrs" is not one of hrrs, fifo, round_robin.'),
        ({"memory_bytes": "1 GB"}, 'services.0.memory_bytes: "1 GB" is not allowed: expected a valid integer.'),
        ({"jobs_max": 0}, "services.0.jobs_max: 0 is not allowed"),
        ({"name": "auto"}, "services.0.name: auto means that the placement chooses. Choose another name"),
        ({"name": "rollout-1"}, "services.0.name: rollout-1 is what a job's own process is called."),
        ({"name": "a.b"}, 'services.0.name: "a.b" is not allowed'),
    ],
)
def test_a_wrong_service_is_told_with_line_field_and_fix(tmp_path: Path, change: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError) as refused:
        services(tmp_path, change)
    assert says in str(refused.value)
    assert str(refused.value).startswith(f"{tmp_path / 'services.yaml'}:")
    assert "\n" not in str(refused.value)


def test_names_are_given_once_and_a_file_without_services_is_none(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"services\.1\.name: train-0 is the name of two services"):
        services(tmp_path, {}, {})
    with pytest.raises(ConfigError, match="services: is empty"):
        load_services(written(tmp_path, services=[]))
    with pytest.raises(ConfigError, match=r"services.0.ranks: 2, but backend is simulated"):
        load_services(written(tmp_path, services=[SERVICE | {"ranks": 2, "backend": "simulated"}]))
    with pytest.raises(ConfigError, match="nlp has two quotas"):
        load_services(written(tmp_path, services=[SERVICE], quotas=[{"project": "nlp"}, {"project": "nlp"}]))
    with pytest.raises(ConfigError, match=r"placement: .*spread_backfill"):
        load_services(written(tmp_path, services=[SERVICE], placement="spread_backfil"))


@pytest.mark.parametrize(
    ("trainer", "model", "says"),
    [
        ({"service": "train0"}, {}, ("trainer.service", "Did you mean 'train-0'?")),
        ({"service": "gpu"}, {}, ("trainer.service", "Use one of: train-0, auto")),
        ({"threads": 2}, {}, ("trainer.threads", "Write 1, or choose another service")),
        ({"device": "cuda"}, {}, ("trainer.device", "Write cpu, or choose another service")),
        ({"backend": "simulated"}, {}, ("trainer.backend", "Write torch, or choose another service")),
        ({}, {"dtype": "bfloat16"}, ("model.dtype", "Write float32, or choose another service")),
        ({"service": "auto", "threads": 3}, {}, ("trainer.threads", "Write 1, or choose another service")),
    ],
)
def test_a_job_that_contradicts_its_service_is_told_the_key_and_what_to_write(
    tmp_path: Path, trainer: dict[str, Any], model: dict[str, Any], says: tuple[str, str]
) -> None:
    shared = services(tmp_path, {"device": "cpu", "dtype": "float32"})
    base = smallest_job()
    job = smallest_job(trainer={"service": "train-0", **trainer}, model=base.model.model_dump() | model)
    ((field, wrong, fix),) = problems_with(job, shared)
    assert (field, fix) == says
    assert wrong


def test_a_job_without_a_service_is_nobodys_business_and_one_with_a_service_needs_some(tmp_path: Path) -> None:
    assert problems_with(smallest_job(), None) == problems_with(smallest_job(), services(tmp_path)) == []
    ((field, wrong, fix),) = problems_with(smallest_job(trainer={"service": "auto"}), None)
    assert (field, "there are no services" in wrong, "--services FILE" in fix) == ("trainer.service", True, True)
    named = smallest_job(name="service.train-0", trainer={"service": "train-0"})
    assert problems_with(named, services(tmp_path))[0][0] == "name"


def test_auto_needs_one_service_that_suits(tmp_path: Path) -> None:
    shared = services(tmp_path, {}, {"name": "train-1", "threads": 4})
    assert problems_with(smallest_job(trainer={"service": "auto", "threads": 4}), shared) == []


@pytest.mark.parametrize(("ranks", "fix"), [(1, "Write 2, or choose another service"), (2, None)])
def test_a_job_says_how_many_ranks_its_service_has(tmp_path: Path, ranks: int, fix: str | None) -> None:
    """So that it is the same job with and without the service."""
    shared = services(tmp_path, {"backend": "fsdp", "ranks": 2})
    job = smallest_job(trainer={"service": "train-0", "backend": "fsdp", "ranks": ranks})
    assert [(field, said) for field, _, said in problems_with(job, shared)] == (
        [] if fix is None else [("trainer.ranks", fix)]
    )


def test_a_service_that_comes_as_a_map_is_checked_as_one_in_a_file() -> None:
    assert service_from_mapping(SERVICE, "x").name == "train-0"
    with pytest.raises(ConfigError, match="x: memory_bytes: is missing"):
        service_from_mapping({"name": "a"}, "x")
    with pytest.raises(ConfigError, match="x: ranks: 2, but backend is torch, which computes in one process"):
        service_from_mapping(SERVICE | {"ranks": 2}, "x")
    with pytest.raises(ConfigError, match="x: name: trainer is what"):
        service_from_mapping(SERVICE | {"name": "trainer"}, "x")
