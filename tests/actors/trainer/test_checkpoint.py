"""Checkpoints: whole or not there; what is altered is refused by the name of the file."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest

from actors.trainer import checkpoint
from actors.trainer.checkpoint import CheckpointState
from actors.trainer.errors import CheckpointCorrupt


def store(run_dir: Path, step: int, content: str = "weights") -> Path:
    partial = checkpoint.begin(run_dir, step)
    (partial / "model.safetensors").write_text(content)
    (partial / checkpoint.TRAINER_DIRECTORY / "weights.safetensors").write_text("moments")
    return checkpoint.commit(partial, CheckpointState(job="j", step=step))


def test_what_was_stored_is_read_back(tmp_path: Path) -> None:
    path = store(tmp_path, 40)
    assert path == tmp_path / "checkpoints" / "step_000040"
    state = checkpoint.read(path)
    assert (state.job, state.step) == ("j", 40)
    assert sorted(state.files) == ["model.safetensors", "trainer/weights.safetensors"]


def test_the_newest_is_the_one_of_the_highest_step_not_of_the_last_name(tmp_path: Path) -> None:
    assert checkpoint.newest(tmp_path) is None
    for step in (5, 1_000_000, 20):
        store(tmp_path, step)
    newest = checkpoint.newest(tmp_path)
    assert newest is not None and newest.name == "step_1000000"


def test_an_unfinished_checkpoint_is_invisible_and_is_written_over(tmp_path: Path) -> None:
    partial = checkpoint.begin(tmp_path, 3)
    (partial / "half").write_text("x")
    assert checkpoint.newest(tmp_path) is None
    path = store(tmp_path, 3)
    assert not (path / "half").exists()
    assert [p.name for p in (tmp_path / "checkpoints").iterdir()] == ["step_000003"]


def test_a_replay_replaces_the_checkpoint_of_the_same_step(tmp_path: Path) -> None:
    store(tmp_path, 3, "old")
    assert (store(tmp_path, 3, "new") / "model.safetensors").read_text() == "new"


def test_a_kill_while_the_replaced_checkpoint_is_removed_leaves_the_new_one_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is half removed must not have a checkpoint's name: every start would take it for the newest."""
    store(tmp_path, 3, "old")
    remove = shutil.rmtree

    def killed_midway(path: Path, ignore_errors: bool = False) -> None:
        if path.name.endswith(".partial"):
            remove(path, ignore_errors=ignore_errors)
        elif path.exists():
            (path / "model.safetensors").unlink()
            raise KeyboardInterrupt

    monkeypatch.setattr(shutil, "rmtree", killed_midway)
    with pytest.raises(KeyboardInterrupt):
        store(tmp_path, 3, "new")
    newest = checkpoint.newest(tmp_path)
    assert newest is not None and checkpoint.read(newest).step == 3
    assert (newest / "model.safetensors").read_text() == "new"


def test_what_a_kill_left_of_removed_checkpoints_is_removed_when_next_one_is(tmp_path: Path) -> None:
    """One that is replaced again, and one that is only pruned beside."""
    store(tmp_path, 3, "old")
    for left in ("step_000003", "step_000001"):
        hidden = tmp_path / "checkpoints" / f".{left}.removed"
        hidden.mkdir()
        (hidden / "half").write_text("x")
    assert (store(tmp_path, 3, "new") / "model.safetensors").read_text() == "new"
    assert checkpoint.prune(tmp_path, keep=1) == []
    assert [p.name for p in (tmp_path / "checkpoints").iterdir()] == ["step_000003"]


@pytest.mark.parametrize("name", ["model.safetensors", "trainer/weights.safetensors"])
@pytest.mark.parametrize("damage", ["missing", "short", "altered"])
def test_a_damaged_file_is_named(tmp_path: Path, name: str, damage: str) -> None:
    path = store(tmp_path, 1)
    file = path / name
    content = file.read_bytes()
    if damage == "missing":
        file.unlink()
    else:
        file.write_bytes(content[:-1] if damage == "short" else bytes([content[0] ^ 1]) + content[1:])
    with pytest.raises(CheckpointCorrupt, match=str(file)):
        checkpoint.read(path)


@pytest.mark.parametrize("content", [None, b"", b"{", b'{"step": "x", "job": "j"}', b'{"a": ' + b"[" * 5000])
def test_an_unreadable_state_is_named(tmp_path: Path, content: bytes | None) -> None:
    path = store(tmp_path, 1)
    if content is None:
        (path / "state.json").unlink()
    else:
        (path / "state.json").write_bytes(content)
    with pytest.raises(CheckpointCorrupt, match=r"state\.json"):
        checkpoint.read(path)


def test_pruning_keeps_the_newest(tmp_path: Path) -> None:
    for step in (1, 2, 3, 4):
        store(tmp_path, step)
    removed = checkpoint.prune(tmp_path, keep=2)
    assert [p.name for p in removed] == ["step_000001", "step_000002"]
    assert [p.name for p in checkpoint.stored(tmp_path)] == ["step_000003", "step_000004"]
    assert checkpoint.prune(tmp_path, keep=2) == []


def test_every_file_and_directory_is_on_the_disk_before_the_checkpoint_has_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else a power cut could leave a checkpoint whose name is there and whose bytes are not."""
    synced: list[str] = []
    fsync = os.fsync

    def note(descriptor: int) -> None:
        synced.append(str(Path(f"/proc/self/fd/{descriptor}").readlink()))
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", note)
    path = store(tmp_path, 3)
    partial = path.with_name(".step_000003.partial")
    inside = ["model.safetensors", "trainer/weights.safetensors", "state.json", "trainer"]
    assert set(synced[:-1]) == {str(partial), *(str(partial / name) for name in inside)}
    assert synced[-1] == str(path.parent), "and then the name itself"


def test_an_altered_state_is_found_by_its_own_hash_and_one_of_before_there_was_one_is_read(tmp_path: Path) -> None:
    path = store(tmp_path, 4)
    state_file = path / checkpoint.STATE_FILE
    whole = state_file.read_text()
    state_file.write_text(whole.replace('"step": 4', '"step": 5'))
    with pytest.raises(CheckpointCorrupt, match=r"state\.json: its content was altered .*--back-to"):
        checkpoint.read(path)
    state = json.loads(whole)
    del state["xxh3"]
    state_file.write_text(json.dumps(state))
    assert checkpoint.read(path).step == 4
