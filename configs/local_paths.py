"""Paths that people write into files: found from the working directory, else from beside the file that names them."""

from __future__ import annotations

from pathlib import Path
from typing import Final

RUN_ROOT: Final = Path("runs")
"""Folder in which run directories are made, as seen from the working directory."""


def found(path: str, beside: Path, *, otherwise: str | None = None) -> str:
    """``path`` made absolute if something is there; else ``otherwise``, or as it was written."""
    written = Path(path).expanduser()
    candidates = (Path.cwd() / written, beside / written)
    there = (str(candidate.resolve()) for candidate in candidates if candidate.exists())
    return next(there, path if otherwise is None else otherwise)
