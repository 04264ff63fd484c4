"""Presets by name: ``quickstart`` is ``configs/quickstart.yaml`` of this installation, wherever that lies."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final

_FOLDER: Final = Path(__file__).resolve().parent
_NAME: Final = re.compile(r"[A-Za-z0-9_-]+")


def preset_names() -> list[str]:
    """Names of all presets: job files and scenarios."""
    return sorted(file.stem for file in _FOLDER.glob("*.yaml"))


def file_or_preset(path: str | Path) -> Path:
    """The file at ``path``; if there is none, the preset of that name; else ``path``, for its reader to refuse.

    What installed programs are told as ``configs/NAME.yaml`` in our guides is found, too.
    """
    written = Path(path)
    if written.exists():
        return written
    name = written.stem if written.parent == Path("configs") and written.suffix == ".yaml" else str(path)
    preset = _FOLDER / f"{name}.yaml"
    return preset if _NAME.fullmatch(name) and preset.is_file() else written
