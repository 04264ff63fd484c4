"""``checkpoints/best``: a link to the checkpoint that evaluates best. It is moved in one step: there is always one."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Final

NAME: Final = "best"


def mark_best(best_first: Iterable[Path]) -> None:
    """Have the link lead to the first of these checkpoints that is on the disk; without one it stays as it is."""
    for path in best_first:
        if path.is_dir():
            partial = path.with_name(f".{NAME}.partial")
            partial.unlink(missing_ok=True)
            partial.symlink_to(path.name)
            partial.replace(path.with_name(NAME))
            return


def best_of(checkpoints: Path) -> Path | None:
    """The checkpoint to which the link of this directory leads; None: there is none."""
    link = checkpoints / NAME
    return link.resolve() if link.is_symlink() and link.exists() else None


def remove_dangling(checkpoints: Path) -> None:
    """Remove the link of this directory if its checkpoint is gone."""
    link = checkpoints / NAME
    if link.is_symlink() and not link.exists():
        link.unlink()
