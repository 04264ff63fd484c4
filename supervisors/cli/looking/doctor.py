"""``headrace doctor``: is this machine fit for runs (machine_report.py), or a run in order (run_report.py)?"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, NoReturn

import typer
from rich.console import Console

from actors.core.strict_json import strict_json
from configs.errors import ConfigError
from configs.run_files import WANDB_ID
from supervisors.cli.command import EXIT_BAD_CONFIG, EXIT_FAILED, EXIT_FINISHED, Json, fail
from transport.errors import HeadraceError


def doctor(
    run: Annotated[
        Path | None,
        typer.Option("--run", metavar="RUN_DIR", help="Check a run instead: what it recorded against the promises."),
    ] = None,
    back_to: Annotated[
        int | None,
        typer.Option(
            "--back-to",
            metavar="STEP",
            min=1,
            help="With --run: go back to this checkpoint; what is newer is set aside.",
        ),
    ] = None,
    json_: Json = False,
) -> None:
    """Say what is installed, what is missing, and how to get it; or whether a run has kept its promises."""
    if run is not None:
        _doctor_run(run, json_, back_to)
    if back_to is not None:
        fail("--back-to goes with --run RUN_DIR", EXIT_BAD_CONFIG)
    from supervisors.cli.looking.machine_report import report

    found = report()
    if json_:
        print(strict_json(found, default=str), flush=True)
    else:
        Console().print(found)
    raise typer.Exit(EXIT_FINISHED if found.healthy else EXIT_FAILED)


def _doctor_run(run_dir: Path, json_: bool, back_to: int | None) -> NoReturn:
    from supervisors.cli.running.run_report import doctor_run
    from supervisors.tree.errors import DirectoryInUse

    try:
        if back_to is not None:
            _go_back(run_dir, back_to, json_)
        raise typer.Exit(doctor_run(run_dir, as_json=json_))
    except (ConfigError, DirectoryInUse) as error:
        fail(str(error), EXIT_BAD_CONFIG)
    except HeadraceError as error:
        fail(f"{type(error).__name__}: {error}", EXIT_FAILED)


def _go_back(run_dir: Path, step: int, json_: bool) -> NoReturn:
    from supervisors.checkers.run_directory import check_directory
    from supervisors.cli.back_to import go_back

    check_directory(run_dir)
    try:
        aside = go_back(run_dir, step)
    except OSError as error:
        fail(f"--run {run_dir}: cannot be changed: {error}", EXIT_FAILED)
    if json_:
        print(strict_json({"run_dir": str(run_dir), "step": step, "set_aside": str(aside)}), flush=True)
    else:
        print(f"{run_dir} is at step {step} again; what was newer lies in {aside}")
        if (aside / WANDB_ID).exists():
            print("charts at Weights & Biases go on in a new run there, which has the steps before, too")
        print(f"go on with  headrace run --resume {run_dir}")
    raise typer.Exit(EXIT_FINISHED)
