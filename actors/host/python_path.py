"""Where processes that we start look for code: our own first, the working directory last.

They are started with ``-P``, which keeps the working directory from coming first: a folder ``actors`` or ``configs`` of
the user's project would be taken for ours. A job may name functions in that directory all the same.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final

_ROOT: Final = Path(__file__).resolve().parents[2]


def python_path() -> str:
    """The ``PYTHONPATH`` of a process that we start."""
    path = [str(_ROOT), *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep)), str(Path.cwd())]
    return os.pathsep.join(dict.fromkeys(path))
