"""Checkpoints on disk: each is whole under its final name, or not there at all.

    RUN_DIR/checkpoints/step_000040/    training goes on at step 40
        config.json  model.safetensors  tokenizer…    an HF directory
        trainer/                                      the backend's own state: master weights, optimizer, schedule
        state.json                                    the frontier, and size and xxh3-128 of every other file

Always true
- A checkpoint is written under a hidden name, every file is flushed to the disk, and then it is renamed.
- Nothing is loaded from a checkpoint before each of its files has the size and the hash that ``state.json`` names.
- A checkpoint is renamed before it is removed, so that a crash leaves no half of one under a checkpoint's name.
- Pruning removes the oldest only after a newer one is durable, and never the one just written.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Container, Iterator
from pathlib import Path
from typing import BinaryIO

import msgspec
import xxhash

from actors.host.plain_file import open_plain, read_plain
from actors.host.whole_file import flush_to_disk
from actors.trainer.errors import CheckpointCorrupt
from configs.errors import ConfigError
from configs.run_files import CHECKPOINTS

STATE_FILE = "state.json"
TRAINER_DIRECTORY = "trainer"
_NAME = re.compile(r"step_(\d{6,})")
_READ_BYTES = 4 << 20
_STATE_BYTES_MAX = 16 << 20


class StoredFile(msgspec.Struct, frozen=True):
    bytes: int
    xxh3: str


class CheckpointState(msgspec.Struct, frozen=True, kw_only=True):
    """Holds what ``state.json`` says. ``step`` is the next step to train; the weights are policy version ``step``."""

    format: int = 1
    job: str
    step: int
    files: dict[str, StoredFile] = {}
    xxh3: str = ""
    """Hash of this struct as JSON with ``xxh3`` empty; empty in checkpoints of 0.1."""


def checkpoints_directory(run_dir: Path) -> Path:
    return run_dir / CHECKPOINTS


def checkpoint_path(run_dir: Path, step: int) -> Path:
    return checkpoints_directory(run_dir) / f"step_{step:06d}"


def stored(run_dir: Path) -> list[Path]:
    """All checkpoints of a run, oldest first. Unfinished ones have other names and are not among them."""
    directory = checkpoints_directory(run_dir)
    found = [path for path in directory.glob("step_*") if _NAME.fullmatch(path.name)] if directory.is_dir() else []
    return sorted(found, key=step_of)


def step_of(path: Path) -> int:
    """The step of the checkpoint at ``path``."""
    return int(path.name.removeprefix("step_"))


def newest(run_dir: Path) -> Path | None:
    """The newest checkpoint of a run, or None."""
    paths = stored(run_dir)
    return paths[-1] if paths else None


def begin(run_dir: Path, step: int) -> Path:
    """Make an empty hidden directory for the checkpoint, and remove what a crash left there."""
    final = checkpoint_path(run_dir, step)
    partial = final.with_name(f".{final.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    (partial / TRAINER_DIRECTORY).mkdir(parents=True)
    return partial


def abandon(partial: Path) -> None:
    """Remove a checkpoint that could not be finished."""
    shutil.rmtree(partial, ignore_errors=True)


def commit(partial: Path, state: CheckpointState) -> Path:
    """Write ``state.json`` with the hash of every file, flush all files, and give the checkpoint its final name."""
    files = {str(file.relative_to(partial)): _describe(file) for file in _files(partial)}
    state = msgspec.structs.replace(state, files=files)
    state = msgspec.structs.replace(state, xxh3=_state_hash(state))
    encoded = msgspec.json.format(msgspec.json.encode(state), indent=2)
    (partial / STATE_FILE).write_bytes(encoded + b"\n")
    for path in [*_files(partial), *sorted(p for p in partial.rglob("*") if p.is_dir()), partial]:
        flush_to_disk(path)
    final = partial.with_name(partial.name.removeprefix(".").removesuffix(".partial"))
    replaced = _hide(final) if final.exists() else None  # a replay reached the same step again
    partial.rename(final)
    flush_to_disk(final.parent)
    if replaced is not None:
        shutil.rmtree(replaced)
    return final


def read(path: Path, *, hashes: bool = True) -> CheckpointState:
    """The state of the checkpoint at ``path``, after all of its files were verified; without ``hashes``, only the sizes
    of all but ``state.json``.

    Raises CheckpointCorrupt, naming the first file that is missing, cut short or altered.
    """
    state_file = path / STATE_FILE
    try:
        content = read_plain(state_file, _STATE_BYTES_MAX, below=path)
        state = msgspec.json.decode(content, type=CheckpointState)
    except (
        OSError,
        ConfigError,
        msgspec.DecodeError,
        ValueError,
        RecursionError,
    ) as error:  # text that is no UTF-8; deep nesting
        raise _corrupt(state_file, str(error)) from error
    if state.xxh3 and state.xxh3 != _state_hash(state):
        raise _corrupt(state_file, "its content was altered (hash differs)")
    for name, expected in state.files.items():
        file = path / name
        try:
            with open_plain(file, below=path) as stream:
                size = os.fstat(stream.fileno()).st_size
                if size != expected.bytes:
                    raise _corrupt(file, f"{size} bytes, expected {expected.bytes}")
                if hashes and _hash(stream) != expected.xxh3:
                    raise _corrupt(file, "its content was altered (hash differs)")
        except FileNotFoundError:
            raise _corrupt(file, "the file is missing") from None
        except ConfigError as error:
            raise _corrupt(file, error.problems[0].wrong) from None
    return state


def prune(run_dir: Path, keep: int, spared: Container[int] = ()) -> list[Path]:
    """Remove all but the newest ``keep`` checkpoints and those of the steps ``spared``; returns what was removed."""
    removed = [path for path in stored(run_dir)[: -max(1, keep)] if step_of(path) not in spared]
    for path in removed:
        _hide(path)
    for hidden in checkpoints_directory(run_dir).glob(".step_*.removed"):  # also those that a crash left
        shutil.rmtree(hidden)
    return removed


def _hide(path: Path) -> Path:
    """Rename a checkpoint that is to be removed: half-removed, it must not look like one."""
    hidden = path.with_name(f".{path.name}.removed")
    shutil.rmtree(hidden, ignore_errors=True)  # a crash left it
    return path.rename(hidden)


def _corrupt(file: Path, what: str) -> CheckpointCorrupt:
    return CheckpointCorrupt(
        f"checkpoint file {file}: {what}; headrace doctor --run names another one, and goes back to it with --back-to"
    )


def _state_hash(state: CheckpointState) -> str:
    return xxhash.xxh3_128_hexdigest(msgspec.json.encode(msgspec.structs.replace(state, xxh3="")))


def _files(directory: Path) -> Iterator[Path]:
    return (path for path in sorted(directory.rglob("*")) if path.is_file())


def _describe(file: Path) -> StoredFile:
    with file.open("rb") as stream:
        return StoredFile(bytes=file.stat().st_size, xxh3=_hash(stream))


def _hash(stream: BinaryIO) -> str:
    digest = xxhash.xxh3_128()
    while block := stream.read(_READ_BYTES):
        digest.update(block)
    return digest.hexdigest()
