"""Files that are there whole or not at all.

    replacing(path) ─▶ <path>.<pid>.partial, to be written ─┬─ the block ends ─▶ renamed to path, over what was there
                                                            └─ it raises ──────▶ removed, path is as it was

Invariants
- Whoever opens ``path`` sees the old content or the new one, whatever crashes when. Processes that write it at the same
  time have a partial file each, and the last one wins.
- ``lasting``: the new content is on the disk when the call returns. Without it a power cut may bring the old one back.
  A flush can take long on a busy disk, so it is only for files that a later run needs.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


def write_whole(path: Path, content: bytes | str, *, lasting: bool = False) -> None:
    """Make ``content``, text in UTF-8, all that the file at ``path`` holds.

    Raises:
        OSError: it cannot be written; the file is as it was.
    """
    with replacing(path, lasting=lasting) as partial:
        partial.write_bytes(content.encode() if isinstance(content, str) else content)


@contextmanager
def replacing(path: Path, *, lasting: bool = False) -> Iterator[Path]:
    """The path of a file to write, which takes the place of ``path`` when the block ends without an error."""
    partial = path.with_name(f"{path.name}.{os.getpid()}.partial")
    try:
        yield partial
        if lasting:
            flush_to_disk(partial)
        partial.replace(path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise
    if lasting:
        with contextlib.suppress(OSError):  # the file is there; some file systems cannot flush folders
            flush_to_disk(path.parent)


def write_once(path: Path, content: str) -> bool:
    """Make a lasting file that this user alone may read, unless ``path`` exists; returns whether it was made.

    Raises:
        OSError: it cannot be written.
    """
    descriptor, made = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")  # mode 0600
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.link(made, path)  # unlike a renaming it does not replace what another has just put there
    except FileExistsError:
        return False
    finally:
        Path(made).unlink()
    flush_to_disk(path.parent)
    return True


def flush_to_disk(path: Path) -> None:
    """Wait until the disk has a file, or the names in a directory."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
