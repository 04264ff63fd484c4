"""The console script ``headrace``: begins the command line, or one of our processes (actor, lead, held).

Role processes are many, and a head has to restart fast, so these start without the libraries of the command line; all
other commands are in ``app.py``.

Our packages have everyday names (``actors``, ``configs``, ``main``). A ``PYTHONPATH`` that leads to a project with a
folder or file of such a name comes before what is installed: then our own folder is put first. Without such a clash
nothing is changed. Processes that we start get our folder first in any case (``configs/python_path.py``).
"""

from __future__ import annotations

import importlib.machinery
import os
import sys
from pathlib import Path
from typing import Final

_ROOT: Final = Path(__file__).resolve().parents[2]
_LONG_LIVED: Final = ("run", "head", "node", "serve", "actor", "lead", "held")
"""Commands that do more than print: they go on when nobody reads their output."""
_ONLY_TOLD: Final = {"--help", "--version"}
_OURS: Final = ("main", "actors", "configs", "transport", "supervisors")


def main() -> None:
    """Console script ``headrace``."""
    if not all(_is_ours(name) for name in _OURS):
        sys.path.insert(0, str(_ROOT))
    command = sys.argv[1:2]
    _prepare_process(long_lived=bool(command) and command[0] in _LONG_LIVED)
    if command == ["actor"]:
        from supervisors.machine.processes.child import run_child

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
    from actors.host.standard_streams import open_standard_streams

    os.umask(0o077)  # what a run writes is its owner's alone
    open_standard_streams(unbreakable=long_lived)
    if not _ONLY_TOLD & set(sys.argv):
        from actors.host.open_files import raise_soft_limit

        raise_soft_limit()


def _is_ours(name: str) -> bool:
    spec = importlib.machinery.PathFinder.find_spec(name, sys.path)
    if spec is None:
        return True  # an editable installation has a finder of its own
    return spec.origin is not None and Path(spec.origin).resolve().is_relative_to(_ROOT)


if __name__ == "__main__":
    main()
