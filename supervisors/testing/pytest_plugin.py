"""Pytest fixtures for tests of your own: they start real runs, harm them, end what is left of them.

    # conftest.py
    pytest_plugins = ["supervisors.testing.pytest_plugin"]

    # test_my_job.py
    def test_my_job_survives_a_killed_worker(headrace_run):
        run = headrace_run("job.yaml", settings=["steps=30"])
        run.wait_for_step(5)
        run.inject("kill", {"role": "rollout"})
        run.finish()

``headrace_jobs`` does the same for several jobs under one command, ``headrace_cluster`` for a head and its nodes.
Guide: docs/guides/fault_injection.md.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from supervisors.testing.run_under_test import HeadraceCluster, HeadraceJobs, HeadraceRun


@pytest.fixture
def headrace_run(tmp_path: Path) -> Iterator[Callable[..., HeadraceRun]]:
    """``headrace_run(job, settings=[…], faults=[…])`` starts a run in a directory of the test's own.

    Arguments as of HeadraceRun; ``name`` tells several runs of one test apart. What still runs at the end of the test
    is killed.
    """
    runs: list[HeadraceRun] = []

    def start(job: Any, *, name: str = "run", **options: Any) -> HeadraceRun:
        runs.append(HeadraceRun(tmp_path / name, job, **options))
        return runs[-1]

    yield start
    for run in runs:
        run.close()


@pytest.fixture
def headrace_jobs(tmp_path: Path) -> Iterator[Callable[..., HeadraceJobs]]:
    """``headrace_jobs(["first.yaml", "second.yaml"], services="services.yaml")`` runs jobs side by side.

    Arguments as of HeadraceJobs. What still runs at the end of the test is killed.
    """
    runs: list[HeadraceJobs] = []

    def start(jobs: Any, *, name: str = "jobs", **options: Any) -> HeadraceJobs:
        runs.append(HeadraceJobs(tmp_path / name, jobs, **options))
        return runs[-1]

    yield start
    for run in runs:
        run.close()


@pytest.fixture
def headrace_cluster(tmp_path: Path) -> Iterator[Callable[..., HeadraceCluster]]:
    """``headrace_cluster("tcp://127.0.0.1:7000")`` starts a head that takes jobs, and listens there for nodes.

    Arguments as of HeadraceCluster. Head and nodes are killed at the end of the test.
    """
    clusters: list[HeadraceCluster] = []

    def start(listen: str, **options: Any) -> HeadraceCluster:
        clusters.append(HeadraceCluster(tmp_path / "head", listen, **options))
        return clusters[-1]

    yield start
    for cluster in clusters:
        cluster.close()
