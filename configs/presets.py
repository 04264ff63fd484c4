"""Presets by name: ``quickstart`` is ``configs/quickstart.yaml`` of this installation, wherever that lies.

Some are jobs, for ``headrace run``; others are scenarios, which begin several jobs and are for ``headrace simulate``.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final

_FOLDER: Final = Path(__file__).resolve().parent
_NAME: Final = re.compile(r"[A-Za-z0-9_-]+")
_SCENARIO: Final = re.compile(r"^jobs:", re.MULTILINE)


def preset_names() -> list[str]:
    """Names of all presets that are jobs."""
    return _names(scenarios=False)


def scenario_names() -> list[str]:
    """Names of all presets that are scenarios."""
    return _names(scenarios=True)


def _names(*, scenarios: bool) -> list[str]:
    files = sorted(_FOLDER.glob("*.yaml"))
    return [file.stem for file in files if bool(_SCENARIO.search(file.read_text("utf-8"))) is scenarios]


def file_or_preset(path: str | Path) -> Path:
    """The file at ``path``; if there is none, the preset of that name; else ``path``, for its reader to refuse.

    ``configs/NAME.yaml``, as our guides write it, is found in an installation, too. A directory is no file, so one that
    has a preset's name, such as the run of a preset, does not stand in its way.
    """
    written = Path(path)
    if written.exists() and not written.is_dir():
        return written
    name = written.stem if written.parent == Path("configs") and written.suffix == ".yaml" else str(path)
    preset = _FOLDER / f"{name}.yaml"
    return preset if _NAME.fullmatch(name) and preset.is_file() else written
