"""Runs whose head and nodes are on hosts of their own; skipped, with the reason, where no hosts can be made."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from benchmarks.namespaces.cluster import ClusterOfHosts
from benchmarks.namespaces.network import Network, why_not
from tests.chaos.small_job import SMALL_JOB

_REASON: list[str] = []


def pytest_runtest_setup(item: pytest.Item) -> None:
    if Path(__file__).parent in item.path.parents:
        if not _REASON:
            _REASON.append(why_not())
        if _REASON[0]:
            pytest.skip(_REASON[0])


@pytest.fixture(scope="session")
def small_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model of SMALL_JOB, as ``headrace run`` would make it."""
    from configs.schema import JobConfig
    from supervisors.preparation.tiny_model import make_tiny_model

    directory = tmp_path_factory.mktemp("model") / "small"
    make_tiny_model(JobConfig.model_validate(SMALL_JOB), directory)
    return directory


@pytest.fixture
def network(tmp_path: Path) -> Iterator[Network]:
    with Network(tmp_path) as network:
        yield network


@pytest.fixture
def start_cluster(network: Network, tmp_path: Path) -> Iterator[Callable[..., ClusterOfHosts]]:
    """``start_cluster(job, nodes={…})`` makes the hosts and starts the run; see ``ClusterOfHosts``."""
    clusters: list[ClusterOfHosts] = []

    def start(job: dict[str, Any], **options: Any) -> ClusterOfHosts:
        clusters.append(ClusterOfHosts(tmp_path, network, job, **options))
        return clusters[-1]

    yield start
    for cluster in clusters:
        cluster.run.close()
