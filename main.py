"""The single entrypoint of a clone and of our own processes: ``python main.py``, ``python -P -m main``.

What it does is written in ``supervisors/cli/entry.py``, where the console script of an installation begins.
"""

from __future__ import annotations

from supervisors.cli.entry import main

if __name__ == "__main__":
    main()
