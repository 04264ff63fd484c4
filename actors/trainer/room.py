"""Checks of room for what a trainer writes: its checkpoints on the run's disk, its versions in shared memory.

    start        all that the run will keep at once must fit, less what it already has
    checkpoint   this one must fit; if it does not, what was written of it is removed, to free that room
    publish      an error that means full memory becomes NoSpaceLeft

NoSpaceLeft is permanent: it ends the run, whose newest checkpoint and journal stay valid.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from actors.host.room import no_space, require_room
from actors.trainer import checkpoint
from actors.trainer.backend import StoredBytes
from actors.weights.segments import bytes_in_memory, segment_directory
from configs.schema import JobConfig


def require_room_for_run(job: JobConfig, run_dir: Path, sizes: StoredBytes) -> None:
    """Check that all checkpoints and versions that the run will keep at once fit.

    Raises:
        NoSpaceLeft: they do not; the message says what is missing and which keys of the job file would need less.
    """
    every = job.checkpoint.every
    best = job.eval if job.checkpoint.keep_best else None
    taken = 1 + (job.steps // every if every else 0) + (job.steps // best.every if best is not None else 0)
    beside = 3 if best is not None else 1  # one being written; the best and one being evaluated
    kept = min(job.checkpoint.keep + beside, taken)
    missing = max(1, kept - len(checkpoint.stored(run_dir)))
    require_room(
        checkpoint.checkpoints_directory(run_dir),
        missing * sizes.checkpoint,
        f"keeping {missing} checkpoint{'s' if missing > 1 else ''} (checkpoint.keep, and the one being written)",
    )
    versions = min(job.limits.versions_held + 1, job.steps + 1)
    there = bytes_in_memory(run_dir) // max(1, sizes.segment)
    missing = max(0, versions - there)
    require_room(
        segment_directory(),
        missing * sizes.segment,
        f"keeping {missing} versions of the weights in shared memory (limits.versions_held, and the one being written)",
    )


@contextmanager
def telling_of_room(path: Path, what: str, needed_bytes: int) -> Iterator[None]:
    """Turn an error that means a full disk into NoSpaceLeft; the block writes ``what`` to ``path``."""
    try:
        yield
    except Exception as error:
        if (full := no_space(error, path, what, needed_bytes)) is not None:
            raise full from error
        raise
