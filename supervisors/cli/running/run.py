"""``headrace run``: jobs on this machine, from their files to their ends, side by side on one head.

JOB.yaml … ─▶ load_job each ─▶ run directories ─▶ trees.run_head ─▶ a summary each ─▶ exit code
--resume DIR ─▶ the jobs that have not finished go on; those that have keep their summaries

    one job    runs/NAME               its run directory, and the head's own
    several    runs/A+B                the head's own: jobs.json, logs, services
               runs/A+B/A, runs/A+B/B  a run directory for each

Invariants
- All files of a command lie in its directory, which no other command shares.
- Whatever can be refused is refused before any job has begun.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer
from rich.console import Console

from actors.core.strict_json import strict_json
from actors.core.terminal_text import harmless
from actors.host.open_files import TooFewDescriptors, check_enough_for
from actors.host.room import NoSpaceLeft
from configs.errors import ConfigError
from configs.local_paths import RUN_ROOT
from configs.names import NAME_CHARACTERS_MAX
from configs.run_files import JOB_FILE, JOBS_FILE, JOURNAL, LOGS, METRICS, SUMMARY, TRACE
from supervisors.cli.command import (
    EXIT_BAD_CONFIG,
    EXIT_FAILED,
    EXIT_FINISHED,
    EXIT_INTERRUPTED,
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
from supervisors.cli.running.services_file import ServicesFile, check_served, services_of

if TYPE_CHECKING:
    from configs.fault_plan import FaultPlan
    from configs.schema import JobConfig
    from configs.services import ServicesConfig
    from supervisors.machine.run_directory import RunLock

_TAKEN: Final = (LOGS, "services")
"""Directories beside those of several jobs, whose names no such job may have."""

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
    from supervisors.tree.errors import DirectoryInUse

    try:
        command = _Command.of(job or [], set_ or [], dir_, resume)
        shared = services_of(services, resume)
        listen = _check(command.jobs, shared)
        plan = load_faults(faults, command.jobs)
        check_sockets(keys, control_keys, listen=listen, at=control)
        check_enough_for(sum(job.rollout.workers for job in command.jobs))
        found = devices_of_this_machine(devices, *command.jobs)
        directory, lock, news = command.own_directory()
    except (ConfigError, DirectoryInUse) as error:
        fail(str(error), EXIT_BAD_CONFIG)
    except (NoSpaceLeft, TooFewDescriptors) as error:
        fail(str(error), EXIT_FAILED)
    console = Console(stderr=json_, highlight=False)
    with lock:
        for line in (*news, command.about(directory)):
            console.print(harmless(line), soft_wrap=True, markup=False)
        jobs = {command.run_dir(directory, job.name): job for job in command.jobs}
        ended: dict[str, Any] = {}
        if jobs:
            from supervisors.cli.running.live_view import view_of
            from supervisors.trees import run_head

            with view_of(command.jobs, console, several=command.several) as view:
                ended = finish(
                    lambda: run_head(
                        directory,
                        jobs,
                        resume=resume is not None,
                        control=control,
                        on_progress=view.update,
                        keys=keys,
                        control_keys=control_keys,
                        faults=plan,
                        services=shared,
                        devices=found,
                    )
                )
        summaries = [ended.get(name) or command.finished[name] for name in command.names(directory)]
        command.report(console, directory, summaries)
        if json_:
            print(strict_json(summaries if command.several else summaries[0]), flush=True)
    raise typer.Exit(exit_code(summaries))


@dataclass(frozen=True)
class _Command:
    """One command runs these jobs. ``several``: each job has a run directory of its own below the command's."""

    jobs: list[JobConfig]
    several: bool
    dir_: Path | None
    resume: Path | None
    finished: dict[str, Any]
    """Summaries of the jobs that have finished already, by name."""

    @classmethod
    def of(cls, files: list[Path], overrides: list[str], dir_: Path | None, resume: Path | None) -> _Command:
        """Raises:
        ConfigError: the files cannot be used, or do not go together.
        """
        from configs.loader import load_job
        from supervisors.api.resume import check_options, check_run

        if resume is None:
            if not files:
                fix = "Write headrace run quickstart, or headrace new for a job of your own"
                raise wrong("headrace run", "no job file was named", fix)
            return cls(_load(files, overrides), len(files) > 1, dir_, None, {})
        if not is_several(resume) and len(files) < 2:
            check_options(files, dir_, resume, overrides)
            job = load_job(resume / JOB_FILE, overrides)
            check_run(resume, job, overrides)
            return cls([job], False, dir_, resume, {})
        if files or dir_ is not None or overrides:
            fix = "Name the directory alone; edit job.yaml in a run directory to change what may change"
            raise wrong(f"--resume {resume}", "several jobs are resumed without job files, --dir and --set", fix)
        finished = dict(_finished(resume))
        return cls(_unfinished(resume, finished), True, dir_, resume, finished)

    def run_dir(self, directory: Path, job: str) -> Path:
        return directory / job if self.several else directory

    def names(self, directory: Path) -> list[str]:
        """Names of the jobs that the command was first given, in order."""
        return _order(directory) if self.several else [job.name for job in self.jobs]

    def own_directory(self) -> tuple[Path, RunLock, list[str]]:
        """Make or find the command's directory; returns it, its lock, and lines for the user.

        Raises:
            ConfigError, DirectoryInUse, NoSpaceLeft: as ``own_run_directory``.
        """
        from supervisors.api.own_directory import own_run_directory
        from supervisors.machine.run_directory import RunLock, make_run_directory

        if not self.several:
            where = f"--resume {self.resume}" if self.resume is not None else f"--dir {self.dir_ or RUN_ROOT}"
            resumes = self.resume is not None
            lock, news = own_run_directory(self.resume or self.dir_, self.jobs[0], resume=resumes, where=where)
            return lock.run_dir, lock, [news] if news else []
        try:
            directory = self.resume or self.dir_ or make_run_directory(RUN_ROOT, self._name())
            lock = RunLock.take(directory)
        except NoSpaceLeft:
            raise
        except OSError as error:
            fail(f"{self.dir_ or RUN_ROOT} cannot be written: {error}", EXIT_BAD_CONFIG)
        try:
            return directory, lock, self._prepare(directory)
        except BaseException:
            lock.release()
            raise

    def _name(self) -> str:
        together = "+".join(job.name for job in self.jobs)
        return together if len(together) <= NAME_CHARACTERS_MAX else f"{self.jobs[0].name[:48]}+{len(self.jobs) - 1}"

    def _prepare(self, directory: Path) -> list[str]:
        """Give each of several jobs its run directory, which the head will lock; returns lines for the user."""
        from supervisors.api.own_directory import own_run_directory

        said: list[str] = []
        for job in self.jobs:
            run_dir = directory / job.name
            (run_dir / SUMMARY).unlink(missing_ok=True)
            where = f"--{'resume' if self.resume else 'dir'} {run_dir}"
            lock, news = own_run_directory(run_dir, job, resume=self.resume is not None, where=where)
            lock.release()
            said += [f"{job.name}: {news}"] if news else []
        if self.resume is None:
            (directory / JOBS_FILE).write_text(json.dumps([job.name for job in self.jobs]) + "\n", encoding="utf-8")
        return said

    def about(self, directory: Path) -> str:
        if self.several:
            return f"{', '.join(job.name for job in self.jobs) or 'no job'}: directory {directory}"
        (job,) = self.jobs
        return f"{job.name}: {job.steps} steps, run directory {directory}"

    def report(self, console: Console, directory: Path, summaries: list[dict[str, Any]]) -> None:
        """The end of each job, and how to go on."""
        for summary in summaries:
            report(console, summary, self.run_dir(directory, str(summary["job"])))
        if self.several and any(summary.get("state") == "interrupted" for summary in summaries):
            console.print(harmless(f"go on with  headrace run --resume {directory}"), soft_wrap=True, markup=False)


def exit_code(summaries: Sequence[Mapping[str, Any]]) -> int:
    """That of a failure if any job has failed, else of an interruption if any was interrupted, else of success."""
    states = {str(summary.get("state")) for summary in summaries}
    if states <= {"finished"}:
        return EXIT_FINISHED
    return EXIT_INTERRUPTED if states <= {"finished", "interrupted"} else EXIT_FAILED


# ------------------------------------------------------------ before it begins


def _load(files: list[Path], overrides: list[str]) -> list[JobConfig]:
    from configs.loader import load_job

    jobs = [load_job(file, overrides) for file in files]
    for index, job in enumerate(jobs):
        if job.name in [other.name for other in jobs[:index]]:
            raise wrong(f"{files[index]}: name", f"{job.name} is the name of two of the jobs", "Rename one of them")
        if job.name in _TAKEN and len(jobs) > 1:
            raise wrong(f"{files[index]}: name", f"{job.name} is a directory beside those of jobs", "Rename the job")
    return jobs


def _check(jobs: list[JobConfig], services: ServicesConfig | None) -> str | None:
    """Refuse what cannot run side by side; returns where other machines join.

    Raises:
        ConfigError: two jobs contradict each other, or none of ``services`` can serve one.
    """
    for job in jobs:
        check_served(job, services)
    if len(jobs) > 1:
        from supervisors.providers.job_provider import check_apart

        check_apart(jobs)
    listens = sorted({job.listen for job in jobs if job.listen is not None})
    if len(listens) > 1:
        what = f"the jobs name several: {', '.join(listens)}"
        raise wrong("cluster.listen", what, "Name the same in all: they have one head")
    return listens[0] if listens else None


def load_faults(path: Path | None, jobs: Sequence[JobConfig]) -> FaultPlan | None:
    """The plan at ``path``, as far as it can be checked before the jobs begin; None without one."""
    if path is None:
        return None
    from configs.fault_plan import load_fault_plan
    from supervisors.nemesis.fault_schedule import check_plan

    plan = load_fault_plan(path)
    if jobs:
        check_plan(plan, jobs, str(path))
    return plan


# ------------------------------------------------------------ a directory of several jobs


def is_several(directory: Path) -> bool:
    """Whether several jobs were run there by one command."""
    return (directory / JOBS_FILE).is_file()


def _order(directory: Path) -> list[str]:
    return [str(name) for name in json.loads((directory / JOBS_FILE).read_text("utf-8"))]


def _unfinished(directory: Path, finished: dict[str, Any]) -> list[JobConfig]:
    """The jobs that have not finished."""
    from configs.loader import load_job
    from supervisors.api.resume import check_run

    jobs: list[JobConfig] = []
    for name in _order(directory):
        if name not in finished:
            jobs.append(job := load_job(directory / name / JOB_FILE, []))
            if (directory / name / JOURNAL).exists():
                check_run(directory / name, job)
    return jobs


def _finished(directory: Path) -> Iterator[tuple[str, Any]]:
    """The summaries of jobs that have finished."""
    for name in _order(directory):
        try:
            summary: dict[str, Any] = json.loads((directory / name / SUMMARY).read_text("utf-8"))
        except (OSError, ValueError):
            continue
        if summary.get("state") == "finished":
            yield name, summary


# ------------------------------------------------------------ at the end


def report(console: Console, summary: dict[str, Any], run_dir: Path) -> None:
    """The end of one job, where its files are, and how to go on."""
    first, last = summary.get("reward_first"), summary.get("reward_last")
    console.print(
        f"{summary.get('job')} {summary.get('state')} after {summary.get('steps')} steps, which took "
        f"{_figure(summary.get('seconds'))} s: reward {_figure(first)} → {_figure(last)}, "
        f"{summary.get('restarts', 0)} restarts, {summary.get('prompts_lost', 0)} prompts lost{_dropped(summary)}",
        soft_wrap=True,
        markup=False,
    )
    rows = [
        ("checkpoint", summary.get("checkpoint")),
        ("metrics", run_dir / METRICS),
        ("trace", run_dir / TRACE),
    ]
    for name, path in rows:
        console.print(harmless(f"  {name:<10} {path or 'none'}"), soft_wrap=True, markup=False)
    if summary.get("state") == "interrupted" or (summary.get("error") and (run_dir / JOURNAL).exists()):
        console.print(harmless(f"  go on with  headrace run --resume {run_dir}"), soft_wrap=True, markup=False)
    if summary.get("error"):
        console.print(harmless(f"  error      {summary['error']}"), soft_wrap=True, markup=False)


def _dropped(summary: dict[str, Any]) -> str:
    """``, 24 of 24 samples dropped``, if any was."""
    dropped = int(summary.get("samples_dropped") or 0)
    return f", {dropped} of {dropped + int(summary.get('samples') or 0)} samples dropped" if dropped else ""


def _figure(value: object) -> str:
    return f"{value:.3g}" if isinstance(value, int | float) else "–"
