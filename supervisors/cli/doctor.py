"""``headrace doctor``: is this machine fit for runs (machine_report.py), or a run in order (run_report.py)?"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, NoReturn

import typer
from rich.console import Console

from configs.errors import ConfigError
from supervisors.cli.command import EXIT_BAD_CONFIG, EXIT_FAILED, EXIT_FINISHED, Json, fail
from transport.errors import HeadraceError


def doctor(
    run: Annotated[
        Path | None,
        typer.Option("--run", metavar="RUN_DIR", help="Check a run instead: what it recorded against the promises."),
    ] = None,
    json_: Json = False,
) -> None:
    """Say what is installed, what is missing, and how to get it; or whether a run has kept its promises."""
    if run is not None:
        _doctor_run(run, json_)
    from supervisors.cli.machine_report import report

    found = report()
    if json_:
        print(json.dumps(found, default=str), flush=True)
    else:
        Console().print(found)
    raise typer.Exit(EXIT_FINISHED if found.healthy else EXIT_FAILED)


def _doctor_run(run_dir: Path, json_: bool) -> NoReturn:
    from supervisors.cli.run_report import doctor_run

    try:
        raise typer.Exit(doctor_run(run_dir, as_json=json_))
    except ConfigError as error:
        fail(str(error), EXIT_BAD_CONFIG)
    except HeadraceError as error:
        fail(f"{type(error).__name__}: {error}", EXIT_FAILED)
