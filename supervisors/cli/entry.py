"""What ``headrace`` is: the command line; for our own processes, actor and lead. The console script begins here.

A role process is one of many on its machine, and a head has to be back soon, so they get by without the command line's
libraries; everything else is ``app.py``.

Our packages have everyday names (``actors``, ``configs``, ``main``). A ``PYTHONPATH`` that leads to a project with a
folder or file of such a name comes before what is installed: then our own place is put first. Without such a clash
nothing is changed. Processes that we start get our place first in any case (``actors/host/python_path.py``).
"""

from __future__ import annotations

import importlib.machinery
import os
import sys
from pathlib import Path
from typing import Final

_ROOT: Final = Path(__file__).resolve().parents[2]
_LONG_LIVED: Final = ("run", "head", "node", "actor", "lead", "held")
"""Commands that have more to do than to print: they go on when nobody reads it."""
_OURS: Final = ("main", "actors", "configs", "transport", "supervisors")


def main() -> None:
    """Console script ``headrace``."""
    if not all(_is_ours(name) for name in _OURS):
        sys.path.insert(0, str(_ROOT))
    command = sys.argv[1:2]
    _prepare_process(long_lived=bool(command) and command[0] in _LONG_LIVED)
    if command == ["actor"]:
        from supervisors.machine.child import run_child

        run_child()
    elif command == ["lead"]:
        from supervisors.head.head_process import run_head_process

        run_head_process()
    elif command == ["held"]:
        from supervisors.api.held_run import run_held

        run_held()
    else:
        from supervisors.cli.app import app

        app(prog_name="headrace")


def _prepare_process(*, long_lived: bool) -> None:
    from actors.host.open_files import raise_soft_limit
    from actors.host.standard_streams import open_standard_streams

    os.umask(0o077)  # what a run writes is its owner's alone
    open_standard_streams(unbreakable=long_lived)
    raise_soft_limit()


def _is_ours(name: str) -> bool:
    spec = importlib.machinery.PathFinder.find_spec(name, sys.path)
    if spec is None:
        return True  # an editable installation has a finder of its own
    return spec.origin is not None and Path(spec.origin).resolve().is_relative_to(_ROOT)


if __name__ == "__main__":
    main()
