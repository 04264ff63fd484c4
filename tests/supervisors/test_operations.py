"""What the control socket does on a head: rows of files, and verbs that come at an awkward moment."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from supervisors.head import Head
from supervisors.operations import Operations


def operations(**head: Any) -> Operations:
    """On a head that has no more than is named."""
    return Operations(cast(Head, SimpleNamespace(**head)))


# ------------------------------------------------------------ files


def row(step: int) -> str:
    """As long as those of real runs."""
    return json.dumps({"step": step, "padding": "x" * 1500})


@pytest.mark.parametrize("last", [1, 3, 100, 1000])
async def test_metrics_are_whole_rows_while_the_next_one_is_being_written(tmp_path: Path, last: int) -> None:
    rows = [row(step) for step in range(200)]
    (tmp_path / "metrics.jsonl").write_text("\n".join([*rows, row(200)[:700]]))
    ops = operations(jobs={"j": SimpleNamespace(run_dir=tmp_path)})
    assert [found["step"] for found in await ops.metrics("j", last)] == list(range(200))[-last:]


async def test_metrics_of_a_job_without_a_whole_row_are_none(tmp_path: Path) -> None:
    ops = operations(jobs={"j": SimpleNamespace(run_dir=tmp_path)})
    assert await ops.metrics("j", 5) == []
    (tmp_path / "metrics.jsonl").write_text(row(0)[:700])
    assert await ops.metrics("j", 5) == []


async def test_a_separator_inside_of_a_row_does_not_part_it(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"text": "a\u2028b"}\n')
    ops = operations(jobs={"j": SimpleNamespace(run_dir=tmp_path)})
    assert await ops.metrics("j", 5) == [{"text": "a\u2028b"}]


async def test_logs_are_the_last_lines_whatever_their_length(tmp_path: Path) -> None:
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "trainer.log").write_text("".join(f"{line} {'y' * 3000}\n" for line in range(100)))
    ops = operations(jobs={"j": SimpleNamespace(run_dir=tmp_path)})
    assert [line.split()[0] for line in await ops.logs("j", "trainer", 60)] == [str(n) for n in range(40, 100)]
