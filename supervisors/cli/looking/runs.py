"""``headrace runs``: which runs there are, how each ended, and how they compare."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from actors.core.strict_json import strict_json
from configs.local_paths import RUN_ROOT
from supervisors.cli.command import EXIT_BAD_CONFIG, Json, fail


def runs(
    root: Annotated[Path, typer.Argument(metavar="ROOT", help="Where run directories lie.")] = RUN_ROOT,
    json_: Json = False,
) -> None:
    """List the runs in a directory, the newest first: state, steps, reward first and last, time, model, date."""
    from supervisors.api.run_files import runs_in
    from supervisors.cli.looking.tables import console, print_result

    if not root.is_dir():
        fail(f"there is no directory {root}: name the one that holds run directories", EXIT_BAD_CONFIG)
    rows = [run.facts() for run in runs_in(root)]
    if json_:
        print(strict_json(rows), flush=True)
    else:
        print_result(console(), "runs", rows)
