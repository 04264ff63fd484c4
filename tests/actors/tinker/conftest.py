"""Directories of these tests lie in memory: the operation log waits for its disk at every operation."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator, MutableMapping
from pathlib import Path
from typing import Any

import pytest
import structlog

_MEMORY = Path("/dev/shm")


@pytest.fixture
def tmp_path(tmp_path: Path) -> Iterator[Path]:
    if not _MEMORY.is_dir():
        yield tmp_path
        return
    path = Path(tempfile.mkdtemp(prefix="headrace-tinker-", dir=_MEMORY))
    yield path
    shutil.rmtree(path, ignore_errors=True)


@pytest.fixture(autouse=True)
def logged() -> Iterator[list[MutableMapping[str, Any]]]:
    """What is logged; a log that nobody has set up draws each traceback with all its variables, for seconds."""
    with structlog.testing.capture_logs() as entries:
        yield entries
