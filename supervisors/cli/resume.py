"""What is looked at before a run is gone on with: is it one, is it still the same run, and what of it is left.

RUN_DIR ─▶ options that go together ─▶ job.yaml ─▶ keys that may not change ─▶ steps ─▶ journal, checkpoints
                                every refusal is one sentence with what to do, and exit code 2
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from supervisors.cli.command import wrong

if TYPE_CHECKING:
    from configs.schema import JobConfig

JOURNAL: Final = "journal.db"


def check_options(jobs: Sequence[Path], dir_: Path | None, resume: Path, overrides: list[str]) -> None:
    """Refuse what does not go with ``--resume``. Raises ConfigError."""
    from supervisors.jobs.run_record import RESUME_MAY_SET, may_change

    where = f"--resume {resume}"
    if jobs or dir_ is not None:
        fix = "The run directory holds its job; leave the other out"
        raise wrong(where, "neither a job file nor --dir goes with it", fix)
    if not (resume / "job.yaml").is_file():
        fix = "Name the directory that the run printed at its start"
        raise wrong(where, "is no run directory: it has no job.yaml", fix)
    for override in overrides:
        key = override.partition("=")[0].strip()
        if not may_change(key):
            raise wrong(where, f"{key} cannot change in mid-run", f"Only these can: {', '.join(RESUME_MAY_SET)}")


def check_run(resume: Path, job: JobConfig) -> None:
    """Refuse a run that cannot be gone on with as it is. Raises ConfigError."""
    from supervisors.jobs.run_record import changed_keys

    where = f"--resume {resume}"
    if changes := changed_keys(resume, job):
        said = "; ".join(f"{key} was {_shown(before)} and is {_shown(now)}" for key, before, now in changes)
        fix = f"Put back what the run began with in {resume / 'job.yaml'}, or begin a new run with the new values"
        raise wrong(where, f"is another run now: {said}", fix)
    done = committed_steps(resume)
    if job.steps < done:
        fix = f"Set steps to more than {done} to go on, or leave it out"
        raise wrong(where, f"steps is {job.steps}, and {done} steps are committed already", fix)
    stored = sorted((resume / "checkpoints").glob("step_*"))
    if stored and not (resume / JOURNAL).is_file():
        fix = f"Put {JOURNAL} back, or begin a new run whose model.path is {stored[-1]}"
        raise wrong(where, f"its {JOURNAL} is gone, so nobody knows which samples were trained", fix)


def committed_steps(run_dir: Path) -> int:
    """Steps that the run has committed, by the last whole row of its metrics; 0 if it has none that can be read."""
    from configs.limits import DEFAULT_LIMITS
    from supervisors.machine.file_end import whole_lines

    at_most = DEFAULT_LIMITS.error_text_chars
    try:
        rows: list[Any] = [json.loads(line) for line in whole_lines(run_dir / "metrics.jsonl", 1, at_most)]
        return int(rows[-1]["step"]) + 1 if rows else 0
    except (OSError, ValueError, KeyError, TypeError):
        return 0


def _shown(value: object) -> str:
    text = json.dumps(value)
    return text if len(text) <= 80 else f"{text[:79]}…"
