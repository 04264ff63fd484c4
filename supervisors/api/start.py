"""The ways to a run: start one, go on with one, run one to its end, connect to one.

start(job)      job ─▶ checked ─▶ run directory ─▶ a process of its own ─▶ Run
resume(dir)     the same with the job that is in the directory
run_job(job)    start ─▶ events ─▶ summary
connect(where)  run directory, endpoint ─▶ Run
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from actors.control.client import ControlClient
from actors.control.errors import NotFound
from actors.control.socket import read_endpoint
from configs.errors import ConfigError
from configs.loader import load_job
from configs.run_files import CONTROL_ENDPOINT, JOB_FILE
from configs.schema import JobConfig
from supervisors.api.errors import NoRun
from supervisors.api.events import Event
from supervisors.api.held_process import HeldProcess, Summary
from supervisors.api.held_run import HeldOrder
from supervisors.api.job import JobSource, Reward, Settings, folders_of, job_of, overrides_of
from supervisors.api.loop_thread import block
from supervisors.api.own_directory import own_run_directory
from supervisors.api.resume import check_options, check_run
from supervisors.api.run import Run
from supervisors.api.run_files import RunFiles
from transport.zmq.security import NodeKeys, load_keys


def start(
    job: JobSource,
    settings: Settings | None = None,
    *,
    reward: Reward | None = None,
    run_dir: str | Path | None = None,
) -> Run:
    """Start a run in a process of its own, and return at once. The run ends when nothing refers to the result any more.

    Args:
        job: a job file, the name of a preset, a map as in a job file, or a JobConfig.
        settings: keys that are set in it, as after ``--set``: ``{"steps": 20, "rollout.workers": 4}``.
        reward: the reward function itself, which must be in a module, since the scoring processes import it.
        run_dir: default: a new directory below ``runs``.

    Raises:
        ConfigError: something is wrong with the job or the directory; the message says what, and what to do.
        DirectoryInUse, NoSpaceLeft: the directory is another run's, or on a full disk.
    """
    checked = job_of(job, settings, reward)
    return _begin(checked, Path(run_dir) if run_dir is not None else None, resume=False, where=f"run_dir {run_dir}")


def resume(run_dir: str | Path, settings: Settings | None = None) -> Run:
    """Go on with a run that was interrupted or has failed, as ``start``.

    Args:
        settings: keys that may change during a run, such as ``{"steps": 200}``.

    Raises:
        ConfigError, DirectoryInUse, NoSpaceLeft: as ``start``; ConfigError also if the run cannot go on or is none.
    """
    directory, overrides = Path(run_dir), overrides_of(settings or {})
    check_options((), None, directory, overrides)
    job = load_job(directory / JOB_FILE, overrides)
    check_run(directory, job, overrides)
    return _begin(job, directory, resume=True, where=f"resume {run_dir}")


def run_job(
    job: JobSource,
    settings: Settings | None = None,
    *,
    reward: Reward | None = None,
    run_dir: str | Path | None = None,
    on_event: Callable[[Event], object] | None = None,
) -> Summary:
    """Run a job to its end and return its summary; ``on_event=print`` shows what goes on.

    An interrupt (Ctrl-C, or a notebook's stop button) makes the run write its checkpoint and end; a second one ends it
    at once.

    Raises:
        RunFailed: the run has failed; the error holds its ``summary``.
        ConfigError, DirectoryInUse, NoSpaceLeft: as ``start``.
    """
    with start(job, settings, reward=reward, run_dir=run_dir) as run:
        if on_event is not None:
            for event in run.events():
                on_event(event)
        return run.wait()


def connect(where: str | Path, *, job: str | None = None, keys: str | Path | None = None) -> Run:
    """A run that was started elsewhere, live or over, to watch and steer. It does not end with the returned object.

    Args:
        where: its run directory, or the control endpoint of its head.
        job: at an endpoint, the job's name; not needed if there is only one.
        keys: directory of this client's keys, for a head on another machine.

    Raises:
        NoRun: ``where`` is neither a run directory nor an endpoint.
        NotFound: the head has no such job, or several and none was named.
        Unreachable: nobody answers at the endpoint.
        KeyFileError, ValueError: keys are needed, or those given cannot be read.
    """
    pair = load_keys(Path(keys)) if keys is not None else None
    if "://" in str(where):
        return block(_at(str(where), job, pair))
    directory = Path(where).expanduser().resolve()
    if RunFiles(directory).is_run:
        return Run(RunFiles(directory).name, run_dir=directory, keys=pair)
    if (directory / CONTROL_ENDPOINT).is_file():
        return block(_at(read_endpoint(str(directory)), job, pair))
    raise NoRun(
        f"{where} is no run directory, as it has no job.yaml, and no endpoint such as tcp://HOST:PORT; name the "
        "directory that the run printed, such as runs/quickstart"
    )


async def _at(endpoint: str, job: str | None, keys: NodeKeys | None) -> Run:
    async with ControlClient(endpoint, keys=keys) as client:
        rows = {str(row["job"]): row for row in await client.call("jobs")}
    name = next(iter(rows)) if job is None and len(rows) == 1 else job
    if name is None or name not in rows:
        what = f"there is no job {job!r}" if job is not None else "say which job you mean"
        raise NotFound(f"{what}: the jobs at {endpoint} are {', '.join(sorted(rows)) or 'none yet'}", "Name one: job=…")
    directory = Path(str(rows[name]["run_dir"]))
    here = RunFiles(directory).is_run and RunFiles(directory).name == name
    return Run(name, run_dir=directory if here else None, endpoint=endpoint, keys=keys)


def _begin(job: JobConfig, run_dir: Path | None, *, resume: bool, where: str) -> Run:
    lock, _ = own_run_directory(run_dir, job, resume=resume, where=where)
    lock.release()  # the run's own process takes it
    directory = lock.run_dir.resolve()
    order = HeldOrder(job=job.model_dump_json(), run_dir=str(directory), resume=resume)
    try:
        process = HeldProcess(order, folders_of(job))
    except OSError as error:
        raise ConfigError.of(where, "", f"the run's process cannot be started: {error}", "Make room for it") from error
    return Run(job.name, run_dir=directory, process=process)
