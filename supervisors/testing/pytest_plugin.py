"""Pytest fixtures for your own tests: they start real runs, inject faults, and end what still runs.

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
from typing import Any, TypeVar

import pytest

from supervisors.testing.run_under_test import HeadraceCluster, HeadraceJobs, HeadraceRun


@pytest.fixture
def headrace_run(tmp_path: Path) -> Iterator[Callable[..., HeadraceRun]]:
    """``headrace_run(job, settings=[…], faults=[…])`` starts a run in the test's own directory.

    Arguments are those of HeadraceRun; ``name`` tells several runs of one test apart. Runs that go on at the end of
    the test are killed.
    """
    yield from _starting(HeadraceRun, tmp_path, "run")


@pytest.fixture
def headrace_jobs(tmp_path: Path) -> Iterator[Callable[..., HeadraceJobs]]:
    """``headrace_jobs(["first.yaml", "second.yaml"], services="services.yaml")`` runs jobs side by side.

    Arguments are those of HeadraceJobs. Jobs that still run at the end of the test are killed.
    """
    yield from _starting(HeadraceJobs, tmp_path, "jobs")


@pytest.fixture
def headrace_cluster(tmp_path: Path) -> Iterator[Callable[..., HeadraceCluster]]:
    """``headrace_cluster("tcp://127.0.0.1:7000")`` starts a head that takes jobs, and listens there for nodes.

    Arguments are those of HeadraceCluster. Head and nodes are killed at the end of the test.
    """
    yield from _starting(HeadraceCluster, tmp_path, "head")


R = TypeVar("R", HeadraceRun, HeadraceJobs, HeadraceCluster)


def _starting(kind: Callable[..., R], parent: Path, named: str) -> Iterator[Callable[..., R]]:
    runs: list[R] = []

    def start(*what: Any, name: str = named, **options: Any) -> R:
        runs.append(kind(parent / name, *what, **options))
        return runs[-1]

    yield start
    for run in runs:
        run.close()
