"""``import headrace`` is what a Python user types first: it gives the whole API, wherever the program runs."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import headrace
from configs.python_path import python_path
from configs.schema import JobConfig
from configs.version import version
from supervisors import api


def test_it_gives_all_of_the_api_the_job_and_the_errors_that_calls_raise() -> None:
    assert set(api.__all__) < set(headrace.__all__)
    assert all(getattr(headrace, name) is getattr(api, name) for name in api.__all__)
    assert headrace.Job is JobConfig
    errors = [headrace.ControlError, headrace.DirectoryInUse, headrace.NoRun, headrace.NoSpaceLeft, headrace.RunFailed]
    assert all(issubclass(error, headrace.HeadraceError) for error in errors)
    assert headrace.__version__ == version() != "unknown"


def test_it_can_be_imported_from_any_directory_and_loads_nothing_heavy(tmp_path: Path) -> None:
    code = "import sys, headrace; print(headrace.start, [m for m in ('torch', 'transformers') if m in sys.modules])"
    said = subprocess.run(
        [sys.executable, "-P", "-c", code], cwd=tmp_path, env={**os.environ, "PYTHONPATH": python_path()},
        capture_output=True, text=True, check=True, timeout=60,
    ).stdout  # fmt: skip
    assert said.startswith("<function start") and said.endswith("[]\n")
