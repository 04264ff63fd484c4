"""The path on which processes that we start look for code: our own first, the working directory last.

They are started with ``-P``, so that the working directory does not come first: else a folder ``actors`` or ``configs``
of the user's project would be taken for ours. It comes last, so that a job may still name functions in it.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final

OUR_FOLDER: Final = str(Path(__file__).resolve().parents[1])
"""Folder of Headrace's packages."""


def python_path() -> str:
    """The ``PYTHONPATH`` of a process that we start."""
    path = [OUR_FOLDER, *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep)), str(Path.cwd())]
    return os.pathsep.join(dict.fromkeys(path))
