"""``headrace run``: one job on this machine, from its file to its end.

JOB.yaml ─▶ load_job ─▶ run directory ─▶ trees.run_job ─▶ summary ─▶ exit code
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer
from rich.console import Console

from actors.core.terminal_text import harmless
from actors.host.open_files import TooFewDescriptors, check_enough_for
from actors.host.room import NoSpaceLeft
from configs.errors import ConfigError
from configs.local_paths import RUN_ROOT
from supervisors.cli.command import (
    EXIT_BAD_CONFIG,
    EXIT_FAILED,
    Control,
    ControlKeys,
    DeviceOption,
    Json,
    Keys,
    check_sockets,
    devices_of_this_machine,
    fail,
    finish,
    wrong,
)
from supervisors.cli.run_end import EXIT_OF_STATE, report
from supervisors.cli.run_several import is_several, run_several
from supervisors.cli.services_file import ServicesFile, check_served, services_of

if TYPE_CHECKING:
    from configs.fault_plan import FaultPlan
    from configs.schema import JobConfig
    from configs.services import ServicesConfig
    from supervisors.machine.devices import Devices

Overrides = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="a.b=c", help="Override a key of the job file; repeatable."),
]


def run(
    job: Annotated[
        list[Path] | None,
        typer.Argument(
            metavar="JOB.yaml", help="The job file, or the name of a preset: quickstart, … Several run side by side."
        ),
    ] = None,
    set_: Overrides = None,
    services: ServicesFile = None,
    dir_: Annotated[Path | None, typer.Option("--dir", help="Run directory. Default: runs/NAME.")] = None,
    control: Control = None,
    json_: Json = False,
    resume: Annotated[
        Path | None,
        typer.Option(metavar="RUN_DIR", help="Go on with an interrupted run."),
    ] = None,
    faults: Annotated[
        Path | None,
        typer.Option(metavar="PLAN.yaml", help="Do harm on purpose: a fault plan for the run's real processes."),
    ] = None,
    devices: DeviceOption = None,
    keys: Keys = None,
    control_keys: ControlKeys = None,
) -> None:
    """Run one job on this machine, or several side by side, and wait for the end."""
    from configs.loader import load_job
    from supervisors.api.own_directory import own_run_directory
    from supervisors.api.resume import check_options, check_run
    from supervisors.tree.errors import DirectoryInUse

    overrides, jobs = set_ or [], job or []
    if len(jobs) > 1 or (resume is not None and is_several(resume)):
        run_several(jobs, overrides, services, dir_, control, resume, faults, keys, control_keys, devices, json_=json_)
    try:
        if resume is not None:
            check_options(jobs, dir_, resume, overrides)
            loaded = load_job(resume / "job.yaml", overrides)
            check_run(resume, loaded)
        elif not jobs:
            raise wrong(
                "headrace run",
                "no job file was named",
                "Write headrace run quickstart, or headrace new for a job of your own",
            )
        else:
            loaded = load_job(jobs[0], overrides)
        shared = services_of(services, resume)
        check_served(loaded, shared)
        plan = load_faults(faults, loaded)
        check_sockets(keys, control_keys, listen=loaded.listen, at=control)
        check_enough_for(loaded.rollout.workers)
        found = devices_of_this_machine(devices, loaded)
        where = f"--resume {resume}" if resume is not None else f"--dir {dir_ or RUN_ROOT}"
        lock, news = own_run_directory(resume or dir_, loaded, resume=resume is not None, where=where)
    except (ConfigError, DirectoryInUse) as error:
        fail(str(error), EXIT_BAD_CONFIG)
    except (NoSpaceLeft, TooFewDescriptors) as error:
        fail(str(error), EXIT_FAILED)
    with lock:
        if news:
            Console(stderr=json_, highlight=False).print(harmless(news), soft_wrap=True, markup=False)
        _run_in(lock.run_dir, loaded, resume=resume is not None, plan=plan, control=control, keys=keys,
                control_keys=control_keys, json_=json_, services=shared, devices=found)  # fmt: skip


def _run_in(
    run_dir: Path,
    loaded: JobConfig,
    *,
    resume: bool,
    plan: FaultPlan | None,
    control: str | None,
    keys: Path | None,
    control_keys: Path | None,
    json_: bool,
    services: ServicesConfig | None,
    devices: Devices,
) -> NoReturn:
    """Run the job in a directory that is ours, to the command's end."""
    from supervisors.cli.live_view import ProgressView
    from supervisors.trees import run_job

    console = Console(stderr=json_, highlight=False)
    about = f"{loaded.name}: {loaded.steps} steps, run directory {run_dir}"
    console.print(harmless(about), soft_wrap=True, markup=False)
    with ProgressView(console) as view:
        summary = finish(
            lambda: run_job(
                loaded,
                run_dir,
                resume=resume,
                control=control,
                on_progress=view.update,
                keys=keys,
                control_keys=control_keys,
                faults=plan,
                services=services,
                devices=devices,
            )
        )
    report(console, summary, run_dir)
    if json_:
        print(json.dumps(summary), flush=True)
    raise typer.Exit(EXIT_OF_STATE.get(str(summary.get("state")), EXIT_FAILED))


def load_faults(path: Path | None, job: Any) -> Any:
    """The plan at ``path``, as far as it can be checked before the run; None without one."""
    if path is None:
        return None
    from configs.fault_plan import load_fault_plan
    from supervisors.nemesis.fault_schedule import check_plan

    plan = load_fault_plan(path)
    check_plan(plan, job, str(path))
    return plan
