"""Recognises names on a hub, ``owner/name``; a file or directory of that name comes first."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final

from configs.data_forms import looks_like_data_file

_HUB_NAME: Final = re.compile(r"^[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*$")


def is_hub_name(path: str) -> bool:
    """Whether ``path`` has the form of a hub name, ``owner/model``; callers look for a directory first."""
    return _HUB_NAME.match(path) is not None


def is_hub_data(path: str | None, source: str) -> bool:
    """Whether ``data.path`` is fetched from the hub: nothing lies there, and it has no ending of a data file."""
    if path is None or source not in ("file", "hf_dataset") or not is_hub_name(path):
        return False
    return not looks_like_data_file(path) and not Path(path).exists()
