"""``headrace run`` of several jobs: side by side on one head, which may have training services that they share.

JOB.yaml … ─▶ load_job each ─▶ DIR: jobs.json, and a run directory for each job ─▶ trees.run_jobs ─▶ a list of summaries
--resume DIR ─▶ jobs.json ─▶ those that have not finished go on; the others' summaries are as they were

Invariants
- Everything of the command lies in its directory: ``runs/FIRST+SECOND``, which no other command shares.
- Whatever can be refused is refused before any job has begun.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NoReturn

import typer
from rich.console import Console

from actors.core.terminal_text import harmless
from actors.host.open_files import TooFewDescriptors, check_enough_for
from actors.host.room import NoSpaceLeft
from configs.errors import ConfigError
from configs.local_paths import JOBS_FILE, RUN_ROOT
from configs.names import NAME_CHARACTERS_MAX
from supervisors.cli.command import (
    EXIT_BAD_CONFIG,
    EXIT_FAILED,
    EXIT_FINISHED,
    EXIT_INTERRUPTED,
    check_sockets,
    devices_of_this_machine,
    fail,
    finish,
    wrong,
)
from supervisors.cli.run_end import report
from supervisors.cli.services_file import check_served, services_of

if TYPE_CHECKING:
    from configs.schema import JobConfig
    from configs.services import ServicesConfig
    from supervisors.machine.devices import Devices

_TAKEN: Final = ("logs", "services")


def is_several(directory: Path) -> bool:
    """Whether several jobs were run there by one command."""
    return (directory / JOBS_FILE).is_file()


def run_several(
    files: list[Path],
    overrides: list[str],
    services: Path | None,
    dir_: Path | None,
    control: str | None,
    resume: Path | None,
    faults: Path | None,
    keys: Path | None,
    control_keys: Path | None,
    devices: str | None,
    *,
    json_: bool,
) -> NoReturn:
    """Run the jobs to the command's end."""
    from supervisors.machine.run_directory import RunLock, make_run_directory
    from supervisors.tree.errors import DirectoryInUse

    try:
        if faults is not None:
            raise wrong("--faults", "a fault plan is for one job", "Run that job alone, or use headrace ctl inject")
        if resume is not None:
            if files or dir_ is not None or overrides:
                fix = "Name the directory alone; edit job.yaml in a run directory to change what may change"
                raise wrong(f"--resume {resume}", "neither job files nor --dir nor --set go with several jobs", fix)
            jobs, over = _jobs_of(resume)
        else:
            jobs, over = _load(files, overrides), {}
        shared = services_of(services, resume)
        _check(jobs, shared)
        listen = next((job.cluster.listen for job in jobs if job.cluster.nodes), None)
        check_sockets(keys, control_keys, listen=listen, at=control)
        check_enough_for(sum(job.rollout.workers for job in jobs))
        found = devices_of_this_machine(devices, *jobs)
        directory = resume or dir_ or make_run_directory(RUN_ROOT, _name(jobs))
        lock = RunLock.take(directory)
    except (ConfigError, DirectoryInUse) as error:
        fail(str(error), EXIT_BAD_CONFIG)
    except (NoSpaceLeft, TooFewDescriptors) as error:
        fail(str(error), EXIT_FAILED)
    except OSError as error:
        fail(f"{dir_ or RUN_ROOT} cannot be written: {error}", EXIT_BAD_CONFIG)
    console = Console(stderr=json_, highlight=False)
    with lock:
        try:
            news = _prepare(directory, jobs, over, resume=resume is not None)
        except (ConfigError, DirectoryInUse) as error:
            fail(str(error), EXIT_BAD_CONFIG)
        except NoSpaceLeft as error:
            fail(str(error), EXIT_FAILED)
        for line in (*news, f"{', '.join(job.name for job in jobs) or 'no job'}: directory {directory}"):
            console.print(harmless(line), soft_wrap=True, markup=False)
        ended = _run_in(directory, jobs, console, resume=resume is not None, control=control, keys=keys,
                        control_keys=control_keys, services=shared, devices=found) if jobs else {}  # fmt: skip
        summaries = [ended.get(name) or over[name] for name in _order(directory)]
        for summary in summaries:
            report(console, summary, directory / str(summary["job"]))
        if any(summary.get("state") == "interrupted" for summary in summaries):
            console.print(harmless(f"go on with  headrace run --resume {directory}"), soft_wrap=True, markup=False)
        if json_:
            print(json.dumps(summaries), flush=True)
    raise typer.Exit(_exit_code(summaries))


def _exit_code(summaries: list[dict[str, Any]]) -> int:
    """A job that has failed counts most, one that was interrupted next."""
    states = {str(summary.get("state")) for summary in summaries}
    if states <= {"finished"}:
        return EXIT_FINISHED
    return EXIT_INTERRUPTED if states <= {"finished", "interrupted"} else EXIT_FAILED


def _run_in(
    directory: Path,
    jobs: list[JobConfig],
    console: Console,
    *,
    resume: bool,
    control: str | None,
    keys: Path | None,
    control_keys: Path | None,
    services: ServicesConfig | None,
    devices: Devices,
) -> dict[str, Any]:
    from supervisors.cli.jobs_view import JobsView
    from supervisors.trees import run_jobs

    with JobsView(console, {job.name: job.steps for job in jobs}) as view:
        return finish(
            lambda: run_jobs(
                directory,
                {directory / job.name: job for job in jobs},
                resume=resume,
                control=control,
                on_progress=view.update,
                keys=keys,
                control_keys=control_keys,
                services=services,
                devices=devices,
            )
        )


# ------------------------------------------------------------ before it begins


def _load(files: list[Path], overrides: list[str]) -> list[JobConfig]:
    from configs.loader import load_job

    jobs = [load_job(file, overrides) for file in files]
    for index, job in enumerate(jobs):
        if job.name in [other.name for other in jobs[:index]]:
            raise wrong(f"{files[index]}: name", f"{job.name} is the name of two of the jobs", "Name one otherwise")
        if job.name in _TAKEN:
            raise wrong(f"{files[index]}: name", f"{job.name} is a directory beside those of jobs", "Name it otherwise")
    return jobs


def _check(jobs: list[JobConfig], services: ServicesConfig | None) -> None:
    """Refuse what cannot run side by side. Raises ConfigError."""
    for job in jobs:
        check_served(job, services)
        if job.provider.kind != "none":
            what, fix = "a provider of machines is one job's", "Run that job alone, or leave provider out"
            raise wrong(f"job {job.name}: provider.kind", what, fix)
    listens = sorted({job.cluster.listen for job in jobs if job.cluster.nodes})
    if len(listens) > 1:
        what = f"the jobs name several: {', '.join(listens)}"
        raise wrong("cluster.listen", what, "Name the same in all: they have one head")


def _name(jobs: list[JobConfig]) -> str:
    together = "+".join(job.name for job in jobs)
    return together if len(together) <= NAME_CHARACTERS_MAX else f"{jobs[0].name[:48]}+{len(jobs) - 1}"


def _prepare(directory: Path, jobs: list[JobConfig], over: dict[str, Any], *, resume: bool) -> list[str]:
    """Give each job its run directory, which the head locks; what there is to say of those that go on."""
    from supervisors.api.own_directory import own_run_directory

    said: list[str] = []
    for job in jobs:
        run_dir = directory / job.name
        (run_dir / "summary.json").unlink(missing_ok=True)
        where = f"--{'resume' if resume else 'dir'} {run_dir}"
        lock, news = own_run_directory(run_dir, job, resume=resume, where=where)
        lock.release()
        said += [f"{job.name}: {news}"] if news else []
    if not resume:
        (directory / JOBS_FILE).write_text(json.dumps([job.name for job in jobs]) + "\n", encoding="utf-8")
    return said


def _order(directory: Path) -> list[str]:
    return [str(name) for name in json.loads((directory / JOBS_FILE).read_text("utf-8"))]


def _jobs_of(directory: Path) -> tuple[list[JobConfig], dict[str, Any]]:
    """The jobs of a directory that are to go on, and the summaries of those that have finished."""
    from configs.loader import load_job
    from supervisors.api.resume import check_run

    jobs: list[JobConfig] = []
    over = dict(_finished(directory))
    for name in _order(directory):
        if name not in over:
            job = load_job(directory / name / "job.yaml", [])
            if (directory / name / "journal.db").exists():
                check_run(directory / name, job)
            jobs.append(job)
    return jobs, over


def _finished(directory: Path) -> Iterator[tuple[str, Any]]:
    for name in _order(directory):
        try:
            summary: dict[str, Any] = json.loads((directory / name / "summary.json").read_text("utf-8"))
        except (OSError, ValueError):
            continue
        if summary.get("state") == "finished":
            yield name, summary
