"""The pytest fixture ``headrace_run``, for tests of your own: starts real runs, harms them, ends what is left of them.

    # conftest.py
    pytest_plugins = ["supervisors.testing.pytest_plugin"]

    # test_my_job.py
    def test_my_job_survives_a_killed_worker(headrace_run):
        run = headrace_run("job.yaml", settings=["steps=30"])
        run.wait_for_step(5)
        run.inject("kill", {"role": "rollout"})
        run.finish()

Guide: docs/guides/fault_injection.md.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from supervisors.testing.run_under_test import HeadraceRun


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
