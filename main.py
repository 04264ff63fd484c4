"""The single entrypoint: run, head, node, ctl, doctor, bench, keys, simulate and, for node agents only, actor.

A role process is one of many on its machine, so it gets by without the command line's libraries; everything else is
``supervisors/command_line.py``.
"""

from __future__ import annotations

import sys


def main() -> None:
    """Console script ``headrace``."""
    if sys.argv[1:2] == ["actor"]:
        from supervisors.child import run_child

        run_child()
    else:
        from supervisors.command_line import app

        app(prog_name="headrace")


if __name__ == "__main__":
    main()
