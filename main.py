"""The single entrypoint: run, head, node, ctl, doctor, bench, keys, simulate; for our own processes, actor and lead.

A role process is one of many on its machine, and a head has to be back soon, so they get by without the command line's
libraries; everything else is ``supervisors/cli/app.py``.
"""

from __future__ import annotations

import os
import sys


def main() -> None:
    """Console script ``headrace``."""
    os.umask(0o077)  # what a run writes is its owner's alone
    if sys.argv[1:2] == ["actor"]:
        from supervisors.machine.child import run_child

        run_child()
    elif sys.argv[1:2] == ["lead"]:
        from supervisors.head.head_process import run_head_process

        run_head_process()
    else:
        from supervisors.cli.app import app

        app(prog_name="headrace")


if __name__ == "__main__":
    main()
