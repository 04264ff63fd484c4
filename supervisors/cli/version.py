"""The version of this installation, or of the clone that is run without one."""

from __future__ import annotations

import importlib.metadata
import tomllib
from pathlib import Path
from typing import Final

_PROJECT: Final = Path(__file__).resolve().parents[2] / "pyproject.toml"


def version() -> str:
    """Such as ``0.1.0``; a clone's own file comes first, since it may be newer than what was installed from it."""
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
