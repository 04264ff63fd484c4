"""``checkpoints/best``: a link to the checkpoint that evaluates best, replaced in one step: it is never missing."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Final

from actors.host.whole_file import replacing

NAME: Final = "best"


def mark_best(best_first: Iterable[Path]) -> None:
    """Have the link lead to the first of these checkpoints that is on the disk; if none is, leave the link as it is."""
    for path in best_first:
        if path.is_dir():
            with replacing(path.with_name(NAME)) as partial:
                partial.unlink(missing_ok=True)
                partial.symlink_to(path.name)
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
