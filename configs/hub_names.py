"""What has the form of a name on a hub, ``owner/name``, and is no file or directory here: those come first."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final

from configs.data_forms import looks_like_data_file

_HUB_NAME: Final = re.compile(r"^[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*$")


def is_hub_name(path: str) -> bool:
    """Whether ``path`` has the form of a hub name, ``owner/model``; a directory of that name comes first."""
    return _HUB_NAME.match(path) is not None


def is_hub_data(path: str | None, source: str) -> bool:
    """Whether ``data.path`` is to be asked of the hub: it is nothing here, and no file by its ending."""
    if path is None or source not in ("file", "hf_dataset") or not is_hub_name(path):
        return False
    return not looks_like_data_file(path) and not Path(path).exists()
