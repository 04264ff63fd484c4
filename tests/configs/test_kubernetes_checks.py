"""Checks of ``provider.kubernetes``: each wrong value is named with its field, before anything starts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from configs.checks.provider_checks import check_provider
from configs.loader import load_job
from tests.smallest_job import smallest_job

IMAGE = {"image": "registry.example/headrace:1", "keys_secret": "keys"}


def found(provider: dict[str, Any] | None = None, **kubernetes: Any) -> dict[str, str]:
    """Field → what is wrong with it."""
    section = {"kind": "kubernetes", "nodes_max": 2, "kubernetes": IMAGE | kubernetes} if provider is None else provider
    job = smallest_job(provider=section, cluster={"place_rollout": "elastic", "listen": "tcp://0.0.0.0:7001"})
    return {field: wrong for field, wrong, _ in check_provider(job)}


def test_a_section_that_fits_is_not_objected_to() -> None:
    amounts = {"cpu": 0.5, "memory": "64Gi", "nvidia.com/gpu": 1, "ephemeral-storage": "1.5G"}
    tolerations = [{"key": "a", "value": "b"}, {"operator": "Exists"}]
    volumes = [{"mount": "/a", "claim": "b"}, {"mount": "/c"}]
    assert found(resources={"limits": amounts}, tolerations=tolerations, volumes=volumes) == {}


def test_the_preset_is_a_job_whose_machines_are_pods() -> None:
    job = load_job(Path(__file__).resolve().parents[2] / "configs" / "kubernetes.yaml", [])
    assert (job.provider.kind, job.listen, job.provider.nodes_max) == ("kubernetes", "tcp://0.0.0.0:7001", 4)


@pytest.mark.parametrize(
    ("changes", "field", "wrong"),
    [
        ({"keys_secret": None}, "provider.kubernetes.keys_secret", "is missing"),
        ({"resources": {"limits": {"memory": "64 GB"}}}, "provider.kubernetes.resources.limits.memory", "'64 GB'"),
        ({"resources": {"requests": {"cpu": "two"}}}, "provider.kubernetes.resources.requests.cpu", "'two' is no"),
        ({"shared_memory": "-1Gi"}, "provider.kubernetes.shared_memory", "'-1Gi' is no quantity"),
        (
            {"volumes": [{"mount": "/a", "claim": "b", "host_path": "/c"}]},
            "provider.kubernetes.volumes[0]",
            "has claim and host_path; expected one source",
        ),
        ({"tolerations": [{"value": "b"}]}, "provider.kubernetes.tolerations[0].key", "operator is Equal"),
        (
            {"tolerations": [{"key": "a", "operator": "Exists", "value": "b"}]},
            "provider.kubernetes.tolerations[0].value",
            "is b, but operator: Exists",
        ),
        ({"labels": {"headrace/run": "a"}}, "provider.kubernetes.labels", "headrace/run is set by Headrace"),
    ],
)
def test_what_does_not_fit_is_named(changes: dict[str, Any], field: str, wrong: str) -> None:
    assert wrong in found(**changes)[field]


def test_the_section_belongs_to_its_kind() -> None:
    assert "is missing" in found({"kind": "kubernetes", "nodes_max": 2})["provider.kubernetes"]
    assert "provider.kind is none" in found({"kubernetes": IMAGE})["provider.kubernetes"]
    assert "is missing" in found({"kind": "kubernetes", "kubernetes": IMAGE})["provider.nodes_max"]
