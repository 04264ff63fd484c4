"""A tiny model made once for all real runs, and runs that end with their test."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from headrace_run import SMALL_JOB, RunOfHeadrace


@pytest.fixture(scope="session")
def small_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model of SMALL_JOB, as ``headrace run`` would make it."""
    from configs.schema import JobConfig
    from supervisors.jobs.tiny_model import make_tiny_model

    directory = tmp_path_factory.mktemp("model") / "small"
    make_tiny_model(JobConfig.model_validate(SMALL_JOB), directory)
    return directory


@pytest.fixture
def start_run(tmp_path: Path, small_model: Path) -> Iterator[Callable[..., RunOfHeadrace]]:
    """Starts runs of SMALL_JOB with some keys changed; what still runs at the end of the test is killed."""
    runs: list[RunOfHeadrace] = []

    def start(name: str, *more: str, **changes: Any) -> RunOfHeadrace:
        runs.append(RunOfHeadrace(tmp_path / name, SMALL_JOB | changes, *more, model=small_model))
        return runs[-1]

    yield start
    for run in runs:
        run.close()
