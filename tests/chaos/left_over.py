"""What a run has left: its processes, its shared memory, and in its journal each sample once."""

from __future__ import annotations

import time
from pathlib import Path

from actors.ledger.journal import committed_samples
from actors.weights.segments import run_id, segment_directory

PATIENCE_S = 60.0


def processes_of(run_dir: Path) -> dict[int, str]:
    """Processes that hold a file of ``run_dir`` open, as all of a run's do with their log, or that are named by it."""
    found: dict[int, str] = {}
    own = str(run_dir)
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            words = (entry / "cmdline").read_bytes().decode().replace("\0", " ")
            if own in words or any(str(link.readlink()).startswith(own) for link in (entry / "fd").iterdir()):
                found[int(entry.name)] = words
        except OSError:
            continue
    return found


def nothing_left(run_dir: Path) -> None:
    """Neither processes nor shared memory."""
    until_s = time.monotonic() + PATIENCE_S
    while (left := processes_of(run_dir)) and time.monotonic() < until_s:
        time.sleep(0.1)
    assert not left, "processes outlived the run"
    assert not list(segment_directory().glob(f"headrace-{run_id(run_dir)}*"))


def every_sample_once(run_dir: Path, steps: int) -> None:
    """Those of ``steps`` steps of six prompts with four siblings each, in the journal."""
    names = [(row.step, row.prompt, row.sibling) for row in committed_samples(run_dir / "journal.db")]
    assert len(names) == len(set(names))
    assert set(names) >= {(step, step * 6 + p, s) for step in range(steps) for p in range(6) for s in range(4)}
