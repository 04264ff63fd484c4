"""Files of a directory that somebody else may have made: a run that was sent, or that lies where others may write.

    path ─▶ open_plain ─┬─ a plain file in its directory ─▶ bytes, at most so many ─▶ json_object, line by line
                        └─ a pipe, a device, a link that leads out ─▶ ConfigError

Invariants
- Nothing is waited for: what is no plain file is not opened, and opening waits for no writer.
- Links are followed inside the directory alone.
- ``json_object`` gives finite numbers only, and nothing that is nested deeper than ``NESTED_MAX``.
"""

from __future__ import annotations

import json
import math
import os
import secrets
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, Final, cast

from configs.errors import ConfigError

NESTED_MAX: Final = 32
_INTEGER_DIGITS_MAX: Final = 20
"""Digits of the largest number of 64 bits: lives of processes are numbered by nanoseconds, which take 19."""
_REMEDY: Final = "Remove it, or put the plain file of the run in its place"


def open_plain(path: Path, *, below: Path | None = None) -> BinaryIO:
    """Open the plain file at ``path`` to read it.

    Args:
        below: directory that links may not leave. Default: the one that ``path`` is in.

    Raises:
        FileNotFoundError: there is nothing at ``path``.
        ConfigError: it is no plain file, or a link out of its directory.
    """
    real, room = os.path.realpath(path), os.path.realpath(below or path.parent)
    _require(Path(real).is_relative_to(room), path, "is a link that leads out of its directory")
    _require(stat.S_ISREG(os.lstat(real).st_mode), path, "is no plain file")
    file = os.fdopen(os.open(real, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC), "rb")
    try:  # both once more: the path may have become something else in between
        _require(stat.S_ISREG(os.fstat(file.fileno()).st_mode), path, "is no plain file")
        opened = Path(f"/proc/self/fd/{file.fileno()}").readlink()
        _require(opened.is_relative_to(room), path, "is a link that leads out of its directory")
    except BaseException:
        file.close()
        raise
    return file


def require_plain(path: Path) -> None:
    """Raise ConfigError if there is something at ``path`` that ``open_plain`` would refuse."""
    try:
        open_plain(path).close()
    except FileNotFoundError:
        return


def read_plain(path: Path, most_bytes: int, *, below: Path | None = None) -> bytes:
    """All that the plain file at ``path`` holds.

    Raises:
        FileNotFoundError: there is nothing at ``path``.
        ConfigError: ``open_plain`` refuses it, or it holds more than ``most_bytes``.
    """
    with open_plain(path, below=below) as file:
        content = file.read(most_bytes + 1)
    _require(len(content) <= most_bytes, path, f"is longer than {most_bytes:,} bytes, expected less")
    return content


def newest_lines(path: Path, most_bytes: int) -> list[bytes]:
    """Lines of the newest ``most_bytes`` of a plain file, without one that is cut; none if there is no file.

    Raises:
        ConfigError: ``open_plain`` refuses it.
    """
    try:
        file = open_plain(path)
    except FileNotFoundError:
        return []
    with file:
        skipped = max(0, os.fstat(file.fileno()).st_size - most_bytes)
        file.seek(skipped)
        lines = file.read(most_bytes).split(b"\n")
    return lines[1:] if skipped else lines


def json_object(line: bytes | str) -> dict[str, Any] | None:
    """The JSON object that ``line`` holds; None if it holds something else, is torn, or nested too deeply.

    What is no number between machines (NaN, infinity, an integer of very many digits) is None in it.
    """
    try:
        item: object = json.loads(line, parse_constant=_nothing, parse_int=_integer, parse_float=_finite)
    except (ValueError, RecursionError):
        return None
    if not isinstance(item, dict):
        return None
    opening = (b"{", b"[") if isinstance(line, bytes) else ("{", "[")
    brackets = sum(line.count(bracket) for bracket in opening)  # pyright: ignore[reportArgumentType]
    if brackets > NESTED_MAX and _depth(cast("object", item)) > NESTED_MAX:
        return None
    return cast("dict[str, Any]", item)


def _nothing(_: str) -> None:
    return None


def _integer(digits: str) -> int | None:
    return int(digits) if len(digits) <= _INTEGER_DIGITS_MAX else None


def _finite(text: str) -> float | None:
    value = float(text)
    return value if math.isfinite(value) else None


def _depth(value: object) -> int:
    """How many objects and lists are inside each other; found level by level, without recursion."""
    depth, level = 0, [value]
    while level and depth <= NESTED_MAX:
        inside = [item for item in level if isinstance(item, dict | list)]
        depth += bool(inside)
        level = [
            held
            for item in inside
            for held in (
                cast("dict[str, object]", item).values() if isinstance(item, dict) else cast("list[object]", item)
            )
        ]
    return depth


@contextmanager
def folder_to_write(path: Path, *, below: Path | None = None) -> Iterator[int]:
    """Descriptor of the directory at ``path``, which is made if it is not there, for ``put``.

    Raises:
        ConfigError: it leads out of ``below``.
    """
    if below is not None:
        inside = Path(os.path.realpath(path)).is_relative_to(os.path.realpath(below))
        _require(inside, path, "is a link that leads out of its directory", "Say with --out where to write")
    path.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        if below is not None:  # once more: the path may have become a link in between
            opened = Path(f"/proc/self/fd/{descriptor}").readlink()
            inside = opened.is_relative_to(os.path.realpath(below))
            _require(inside, path, "is a link that leads out of its directory", "Say with --out where to write")
        yield descriptor
    finally:
        os.close(descriptor)


def put(folder: int, name: str, content: bytes) -> None:
    """Make ``content`` all that the file ``name`` holds; a link of that name is replaced, what it leads to stays.

    Raises:
        OSError: it cannot be written.
    """
    partial = f".{name}.{secrets.token_hex(8)}.partial"
    descriptor = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666, dir_fd=folder)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)
        os.replace(partial, name, src_dir_fd=folder, dst_dir_fd=folder)
    except BaseException:
        os.unlink(partial, dir_fd=folder)
        raise


def _require(so: bool, path: Path, wrong: str, fix: str = _REMEDY) -> None:
    if not so:
        raise ConfigError.of(str(path), "", wrong, fix)
