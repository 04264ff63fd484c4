"""The directory of a run that is about to begin or to go on: made or found, locked, with its job in it.

job ─▶ directory made ─▶ locked ─▶ is there room, and is it free (or, of a resumed run, whole) ─▶ job.yaml ─▶ RunLock
"""

from __future__ import annotations

from pathlib import Path

from actors.host.room import no_space, require_room
from configs.errors import ConfigError
from configs.loader import dump_job
from configs.local_paths import RUN_ROOT
from configs.schema import JobConfig
from supervisors.checkers.condition import check_can_go_on
from supervisors.jobs.run_record import data_news, model_news, write_record
from supervisors.machine.run_directory import RunLock, make_run_directory


def own_run_directory(run_dir: Path | None, job: JobConfig, *, resume: bool, where: str) -> tuple[RunLock, str]:
    """The run's directory with its job in it, which nobody else may use until the lock is released.

    And what there is to say of a run that is gone on with.

    Args:
        run_dir: default: a new one below RUN_ROOT.
        where: what people have written to name it, for the messages.

    Raises:
        ConfigError: it cannot be written, holds a run that should not be begun anew, or one that cannot go on.
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
        elif (run_dir / "journal.db").exists() or (run_dir / "job.yaml").exists():
            fix = f"Go on with headrace run --resume {run_dir}, or choose another directory"
            raise ConfigError.of(where, "", "holds a run already", fix)
        _write_job(run_dir, job, where)
        if not resume:
            write_record(run_dir, job)
        news = [model_news(run_dir, job), data_news(run_dir, job)] if resume else []
    except BaseException:
        lock.release()
        raise
    return lock, "\n".join(filter(None, news))


def _write_job(run_dir: Path, job: JobConfig, where: str) -> None:
    """All of it or nothing: what a resume cannot write must not cost it the file that it has."""
    partial = run_dir / ".job.yaml.partial"
    try:
        partial.write_text(dump_job(job), encoding="utf-8")
        partial.replace(run_dir / "job.yaml")
    except OSError as error:
        partial.unlink(missing_ok=True)
        fix = "Choose a directory that you may write"
        raise no_space(error, run_dir, "job.yaml") or ConfigError.of(
            where, "", f"cannot be written: {error}", fix
        ) from error
