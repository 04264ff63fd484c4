"""What ended processes have left is due once nobody can come back for it."""

from __future__ import annotations

from pathlib import Path

import pytest

from actors.weights.memory import map_segment
from actors.weights.segments import held_path, remove_held_by, segment_path
from supervisors.machine.processes.leftover_files import LeftoverFiles

RUN, OTHER_RUN, WORKER = "/runs/one", "/runs/two", "job.rollout-0"
GRACE_S = 30.0


@pytest.fixture
def leftovers() -> LeftoverFiles:
    """One worker of one run has ended at second 100."""
    leftovers = LeftoverFiles()
    leftovers.ended(RUN, WORKER, ["rollout-0"], 7, 100.0)
    return leftovers


def test_what_nobody_comes_back_for_is_due_once(leftovers: LeftoverFiles) -> None:
    assert leftovers.due(129.0, GRACE_S) == []
    (left,) = leftovers.due(130.0, GRACE_S)
    assert (left.run_dir, left.holders, left.pid) == (Path(RUN), ("rollout-0",), 7)
    assert leftovers.due(1000.0, GRACE_S) == []


def test_a_next_life_that_is_ready_keeps_it_and_one_that_is_starting_delays_it(leftovers: LeftoverFiles) -> None:
    assert leftovers.due(500.0, GRACE_S, {(RUN, WORKER)}) == []
    leftovers.ready(RUN, WORKER)
    assert leftovers.due(1000.0, GRACE_S) == []


def test_a_next_life_that_never_gets_ready_only_begins_the_grace_anew(leftovers: LeftoverFiles) -> None:
    leftovers.failed(RUN, WORKER, 200.0)
    assert leftovers.due(229.0, GRACE_S) == []
    assert [left.ended_s for left in leftovers.due(230.0, GRACE_S)] == [200.0]
    leftovers.failed(RUN, "never there", 300.0)
    assert leftovers.due(1000.0, GRACE_S) == []


def test_a_namesake_of_another_run_is_no_next_life(leftovers: LeftoverFiles) -> None:
    leftovers.ready(OTHER_RUN, WORKER)
    assert len(leftovers.due(130.0, GRACE_S, {(OTHER_RUN, WORKER)})) == 1


def test_a_file_that_a_living_process_holds_stays(tmp_path: Path) -> None:
    held, left = (held_path(segment_path(tmp_path, version), "rollout-0") for version in (1, 2))
    try:
        for path in (held, left):
            path.write_bytes(b"abc")
        view = map_segment(held, own=True)
        assert remove_held_by(tmp_path, ["rollout-0"], 7) == 1
        assert (held.exists(), left.exists()) == (True, False)
        view.release()
        del view
        assert remove_held_by(tmp_path, ["rollout-0"], 7) == 1
    finally:
        held.unlink(missing_ok=True)
        left.unlink(missing_ok=True)
