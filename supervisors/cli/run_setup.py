"""What is done to a run directory before its run begins: made, locked, looked at, and given its job file.

RUN_DIR ─▶ mkdir ─▶ lock ─▶ room on the disk, no other run in it, or one that can go on ─▶ job.yaml, began_with.json
                                every refusal is one sentence with what to do
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from actors.host.room import no_space, require_room
from supervisors.cli.command import RUN_ROOT, wrong

if TYPE_CHECKING:
    from configs.schema import JobConfig
    from supervisors.machine.run_directory import RunLock


def own_run_directory(resume: Path | None, chosen: Path | None, job: JobConfig) -> tuple[RunLock, str]:
    """The run's directory with its job in it, which nobody else may use until the lock is released.

    And what there is to say of a run that is gone on with.

    Raises:
        ConfigError: it cannot be written, holds a run that should not be begun anew, or one that cannot go on.
        DirectoryInUse: a run lives in it.
        NoSpaceLeft: there is no room for a run.
    """
    from supervisors.checkers.condition import check_can_go_on
    from supervisors.jobs.run_record import data_news, model_news, write_record
    from supervisors.machine.run_directory import RunLock, make_run_directory

    where = f"--resume {resume}" if resume is not None else f"--dir {chosen or RUN_ROOT}"
    try:
        run_dir = resume or chosen or make_run_directory(RUN_ROOT, job.name)
        lock = RunLock.take(run_dir)
    except OSError as error:
        fix = "Choose a directory that you may write"
        raise wrong(where, f"cannot be written: {error}", fix) from error
    try:
        require_room(run_dir, job.limits.disk_reserve_bytes, "a run")
        if resume is not None:
            check_can_go_on(run_dir)
        elif (run_dir / "journal.db").exists() or (run_dir / "job.yaml").exists():
            fix = f"Go on with headrace run --resume {run_dir}, or choose another directory"
            raise wrong(where, "holds a run already", fix)
        write_job(run_dir, job, where)
        if resume is None:
            write_record(run_dir, job)
        news = [] if resume is None else [model_news(run_dir, job), data_news(run_dir, job)]
    except BaseException:
        lock.release()
        raise
    return lock, "\n".join(filter(None, news))


def write_job(run_dir: Path, job: JobConfig, where: str) -> None:
    """All of it or nothing: what a resume cannot write must not cost it the file that it has."""
    from configs.loader import dump_job

    partial = run_dir / ".job.yaml.partial"
    try:
        partial.write_text(dump_job(job), encoding="utf-8")
        partial.replace(run_dir / "job.yaml")
    except OSError as error:
        partial.unlink(missing_ok=True)
        fix = "Choose a directory that you may write"
        raise no_space(error, run_dir, "job.yaml") or wrong(where, f"cannot be written: {error}", fix) from error
