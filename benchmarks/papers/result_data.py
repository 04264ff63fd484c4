"""What ``simulate --out`` has left of a study: claims, and the curves of a sweep."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from actors.host.plain_file import read_plain
from benchmarks.papers.sweep import Sweep, sweep_from
from configs.errors import ConfigError
from configs.limits import DEFAULT_LIMITS

RESULT: Final = "result.json"
"""File of a directory that ``simulate --out`` wrote."""


@dataclass(frozen=True, slots=True)
class ResultData:
    """Tells how many claims a study had, how many of them were within, and holds its curves."""

    name: str
    claims: int
    within: int
    sweep: Sweep


def holds_result(folder: Path) -> bool:
    """Whether ``folder`` is that of a study, and not that of a run."""
    return (folder / RESULT).is_file()


def read_result(folder: Path) -> ResultData:
    """What ``folder`` holds.

    Raises:
        ConfigError: its file is damaged, or its study has no curves.
    """
    path = folder / RESULT
    try:
        result: dict[str, Any] = json.loads(read_plain(path, DEFAULT_LIMITS.control_read_bytes))
        name, rows, sweep = str(result["scenario"]), list[dict[str, Any]](result["claims"]), result["sweep"]
        if sweep is None:
            raise _wrong(
                path, "has no curves: its study varies nothing", "Draw one of configs/papers/sensitivity_*.yaml"
            )
        return ResultData(name, len(rows), sum(bool(row["within"]) for row in rows), sweep_from(sweep))
    except ConfigError:
        raise
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise _wrong(
            path, f"is no result of a study: {error!r}", "Write it anew with headrace simulate --out"
        ) from error


def _wrong(path: Path, what: str, fix: str) -> ConfigError:
    return ConfigError.of(f"headrace plot {path}", "", what, fix)
