"""Checks before a run is resumed: whether it is a run, is still the same run, and has what it needs to go on.

RUN_DIR ─▶ options that go together ─▶ job.yaml ─▶ keys that may not change ─▶ steps ─▶ journal, checkpoints
                                every refusal is one sentence with what to do, and exit code 2
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from configs.errors import ConfigError
from configs.run_files import CHECKPOINTS, JOB_FILE, JOURNAL, METRICS

if TYPE_CHECKING:
    from configs.schema import JobConfig


def check_options(jobs: Sequence[Path], dir_: Path | None, resume: Path, overrides: list[str]) -> None:
    """Refuse what does not go with ``--resume``. Raises ConfigError."""
    from supervisors.jobs.run_record import RESUME_MAY_SET, RESUME_MAY_SET_IF_SAID, may_change

    where = f"--resume {resume}"
    if jobs or dir_ is not None:
        fix = "The run directory holds its job; leave the other out"
        raise ConfigError.of(where, "", "neither a job file nor --dir goes with it", fix)
    if not (resume / JOB_FILE).is_file():
        fix = "Name the directory that the run printed at its start"
        raise ConfigError.of(where, "", "is no run directory: it has no job.yaml", fix)
    for key in _keys(overrides):
        if not may_change(key) and key not in RESUME_MAY_SET_IF_SAID:
            can = ", ".join((*RESUME_MAY_SET, *RESUME_MAY_SET_IF_SAID))
            raise ConfigError.of(where, "", f"{key} cannot change in mid-run", f"Only these can: {can}")


def _keys(overrides: Sequence[str]) -> list[str]:
    return [override.partition("=")[0].strip() for override in overrides]


def check_run(resume: Path, job: JobConfig, overrides: Sequence[str] = ()) -> None:
    """Refuse a run that cannot be resumed as it is, with ``overrides`` of its job. Raises ConfigError."""
    from supervisors.jobs.run_record import RESUME_MAY_SET_IF_SAID, changed_keys

    where = f"--resume {resume}"
    if changes := changed_keys(resume, job, _keys(overrides)):
        said = "; ".join(f"{key} was {_shown(before)} and is {_shown(now)}" for key, before, now in changes)
        fix = f"Put back what the run began with in {resume / JOB_FILE}, or begin a new run with the new values"
        if all(key in RESUME_MAY_SET_IF_SAID for key, _, _ in changes):
            fix = f"{fix}, or say {' '.join(f'--set {key}={_shown(now)}' for key, _, now in changes)} with the resume"
        raise ConfigError.of(where, "", f"is another run now: {said}", fix)
    done = committed_steps(resume)
    if job.steps < done:
        fix = f"Set steps to more than {done} to go on, or leave it out"
        raise ConfigError.of(where, "", f"steps is {job.steps}, and {done} steps are committed already", fix)
    stored = sorted((resume / CHECKPOINTS).glob("step_*"))
    if stored and not (resume / JOURNAL).is_file():
        fix = f"Put {JOURNAL} back, or begin a new run whose model.path is {stored[-1]}"
        raise ConfigError.of(where, "", f"its {JOURNAL} is gone, so nobody knows which samples were trained", fix)


def committed_steps(run_dir: Path) -> int:
    """Steps that the run has committed, by the last whole row of its metrics; 0 if it has none that can be read."""
    from configs.limits import DEFAULT_LIMITS
    from supervisors.machine.processes.file_end import whole_lines

    at_most = DEFAULT_LIMITS.control_read_bytes
    try:
        rows: list[Any] = [json.loads(line) for line in whole_lines(run_dir / METRICS, 1, at_most)]
        return int(rows[-1]["step"]) + 1 if rows else 0
    except (OSError, ValueError, KeyError, TypeError):
        return 0


def _shown(value: object) -> str:
    text = json.dumps(value)
    return text if len(text) <= 80 else f"{text[:79]}…"
