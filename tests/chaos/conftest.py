"""A tiny model made once for all real runs, and runs of it that end with their test."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from small_job import SMALL_JOB, simulated_job

from supervisors.testing.run_under_test import HeadraceRun


@pytest.fixture(scope="session")
def small_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model of SMALL_JOB, as ``headrace run`` would make it."""
    from configs.schema import JobConfig
    from supervisors.preparation.tiny_model import make_tiny_model

    directory = tmp_path_factory.mktemp("model") / "small"
    make_tiny_model(JobConfig.model_validate(SMALL_JOB), directory)
    return directory


@pytest.fixture
def start_run(headrace_run: Callable[..., HeadraceRun], small_model: Path) -> Callable[..., HeadraceRun]:
    """Starts runs of a simulated SMALL_JOB with some sections changed."""

    def start(name: str, **sections: Any) -> HeadraceRun:
        return headrace_run(simulated_job(small_model, **sections), name=name)

    return start
