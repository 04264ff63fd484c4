"""The version of what is running."""

from __future__ import annotations

import importlib.metadata
import tomllib
from pathlib import Path
from typing import Final

_PROJECT: Final = Path(__file__).resolve().parents[1] / "pyproject.toml"


def version() -> str:
    """Version, such as ``0.1.0``; a clone's pyproject.toml comes first, as it may be newer than the installation."""
    try:
        project = tomllib.loads(_PROJECT.read_text("utf-8"))["project"]
        if project["name"] == "headrace":
            return str(project["version"])
    except (OSError, tomllib.TOMLDecodeError, KeyError):
        pass  # an installation: no project file beside the packages, or somebody else's
    try:
        return importlib.metadata.version("headrace")
    except importlib.metadata.PackageNotFoundError:
        return "unknown"
