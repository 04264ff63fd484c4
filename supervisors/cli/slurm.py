"""``headrace slurm``: prints the file that a person submits to Slurm; the run itself asks for further machines."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import Annotated

import typer

from configs.errors import ConfigError
from configs.local_paths import RUN_ROOT
from supervisors.cli.command import EXIT_BAD_CONFIG, Keys, fail

slurm = typer.Typer(no_args_is_help=True, help="Slurm: print the sbatch file of a head.")


@slurm.callback()
def _group() -> None:
    """Keeps ``template`` a word of its own while it is the only one."""


@slurm.command()
def template(
    job: Annotated[Path, typer.Argument(metavar="JOB.yaml", help="The job file, or the name of a preset.")],
    keys: Keys = None,
    dir_: Annotated[Path | None, typer.Option("--dir", help="Run directory. Default: runs/NAME.")] = None,
) -> None:
    """Print an sbatch file that runs the head of a job; submitted again, it goes on with the run."""
    from configs.loader import load_job
    from configs.presets import file_or_preset
    from supervisors.providers.slurm_script import head_script

    try:
        loaded = load_job(job)
    except ConfigError as error:
        fail(str(error), EXIT_BAD_CONFIG)
    command = loaded.provider.slurm.command or shlex.join([sys.executable, "-P", "-m", "main"])
    path = file_or_preset(job).resolve()
    print(head_script(loaded, command, path, (dir_ or RUN_ROOT / loaded.name).resolve(), keys), end="")
