"""The directory of a run that is about to begin or to go on: made or found, locked, with its job in it.

job ─▶ directory made ─▶ locked ─▶ is there room, and is it free (or, of a resumed run, whole) ─▶ job.yaml ─▶ RunLock
"""

from __future__ import annotations

from pathlib import Path

from actors.host.room import no_space, require_room
from actors.host.whole_file import write_whole
from configs.errors import ConfigError
from configs.loader import dump_job
from configs.local_paths import RUN_ROOT
from configs.run_files import JOB_FILE, JOURNAL
from configs.schema import JobConfig
from supervisors.api.resume import committed_steps
from supervisors.checkers.condition import check_can_go_on
from supervisors.jobs.run_record import data_news, model_news, note_changes, write_record
from supervisors.machine.run_directory import RunLock, make_run_directory


def own_run_directory(run_dir: Path | None, job: JobConfig, *, resume: bool, where: str) -> tuple[RunLock, str]:
    """Lock the run's directory and write the job into it; returns the lock, and news about a run that is resumed.

    Args:
        run_dir: default: a new one below RUN_ROOT.
        where: how the user named the directory, for the messages.

    Raises:
        ConfigError: the directory cannot be written, or holds a run that is not to be begun anew or cannot go on.
        DirectoryInUse: a run lives in it.
        NoSpaceLeft: there is no room for a run.
    """
    try:
        run_dir = run_dir or make_run_directory(RUN_ROOT, job.name)
        lock = RunLock.take(run_dir)
    except OSError as error:
        fix = "Choose a directory that you may write"
        raise ConfigError.of(where, "", f"cannot be written: {error}", fix) from error
    try:
        require_room(run_dir, job.limits.disk_reserve_bytes, "a run")
        if resume:
            check_can_go_on(run_dir)
        elif (run_dir / JOURNAL).exists() or (run_dir / JOB_FILE).exists():
            fix = f"Go on with headrace run --resume {run_dir}, or choose another directory"
            raise ConfigError.of(where, "", "holds a run already", fix)
        _write_job(run_dir, job, where)
        if resume:
            changes = note_changes(run_dir, job, committed_steps(run_dir))
            news = [model_news(run_dir, job), data_news(run_dir, job), changes]
        else:
            write_record(run_dir, job)
            news = []
    except BaseException:
        lock.release()
        raise
    return lock, "\n".join(filter(None, news))


def _write_job(run_dir: Path, job: JobConfig, where: str) -> None:
    """Write all of the file or nothing: a resume that cannot write must not lose the old one."""
    try:
        write_whole(run_dir / JOB_FILE, dump_job(job), lasting=True)
    except OSError as error:
        fix = "Choose a directory that you may write"
        raise no_space(error, run_dir, JOB_FILE) or ConfigError.of(
            where, "", f"cannot be written: {error}", fix
        ) from error
