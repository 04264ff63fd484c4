"""A trainer looks for room before it writes, says in a sentence that there is none, and leaves no half behind."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest

from actors.core.watch import ActorExit
from actors.host import room
from actors.host.room import NoSpaceLeft
from actors.trainer import checkpoint
from actors.trainer.backend import StoredBytes
from actors.trainer.room import require_room_for_run
from actors.weights.segments import segment_path
from tests.actors.trainer.trainer_world import NotingBackend, World, job_config
from tests.simulated import run_simulated


def free(monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    monkeypatch.setattr(room, "free_bytes", lambda _: count)


def test_what_a_run_will_keep_at_once_must_fit_at_its_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = StoredBytes(segment=10, checkpoint=100)
    job = job_config(steps=100, checkpoint={"every": 5, "keep": 2})
    free(monkeypatch, 299)
    with pytest.raises(NoSpaceLeft, match=r"keeping 3 checkpoints \(checkpoint\.keep, .* needs 300 bytes"):
        require_room_for_run(job, tmp_path, sizes)
    require_room_for_run(job_config(steps=100, checkpoint={"every": 0, "keep": 2}), tmp_path, sizes)  # one, at the end
    (checkpoint.checkpoints_directory(tmp_path) / "step_000005").mkdir(parents=True)
    require_room_for_run(job, tmp_path, sizes)  # what is there needs no more room


def test_shared_memory_must_fit_the_versions_that_are_held(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = StoredBytes(segment=1000, checkpoint=1)
    free(monkeypatch, 4999)
    with pytest.raises(NoSpaceLeft, match=r"5 versions of the weights in shared memory \(limits\.versions_held"):
        require_room_for_run(job_config(steps=9), tmp_path, sizes)
    require_room_for_run(job_config(steps=3), tmp_path, sizes)
    own = segment_path(tmp_path, 7)
    own.write_bytes(b"x" * 1000)
    try:
        require_room_for_run(job_config(steps=9), tmp_path, sizes)
    finally:
        own.unlink()


def full(*_: object, **__: object) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


async def full_soon(*_: object, **__: object) -> None:
    full()


def run_to_end(world: World) -> ActorExit:
    async def main() -> ActorExit:
        await world.start()
        return await world.finish()

    return run_simulated(main())


@pytest.mark.parametrize("at", ["before", "save", "export", "commit"])
def test_a_checkpoint_without_room_ends_the_trainer_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at: str
) -> None:
    if at == "before":  # at the start there was enough
        monkeypatch.setattr(room, "free_bytes", lambda path: 0 if ".partial" in str(path) else 1 << 40)
    elif at == "commit":
        monkeypatch.setattr(checkpoint, "commit", full)
    else:
        monkeypatch.setattr(NotingBackend, {"save": "save", "export": "export_checkpoint"}[at], full_soon)
    ended = run_to_end(World(tmp_path))
    assert isinstance(ended.error, NoSpaceLeft) and ended.error.permanent
    assert "the checkpoint of step 3 needs" in str(ended.error)
    assert list(checkpoint.checkpoints_directory(tmp_path).iterdir()) == []


def test_full_shared_memory_ends_the_trainer_with_the_version_that_found_no_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(NotingBackend, "export_segment", full_soon)
    ended = run_to_end(World(tmp_path))
    assert isinstance(ended.error, NoSpaceLeft) and "version 0 of the weights needs" in str(ended.error)
