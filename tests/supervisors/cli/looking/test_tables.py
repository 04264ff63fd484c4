"""The tables of ``ctl`` fit a terminal of 100 columns: no cell of usual length is broken in two."""

from __future__ import annotations

from typing import Any

import pytest
from rich.console import Console

from supervisors.cli.looking.tables import print_result

ROWS: dict[str, dict[str, Any]] = {
    "tree": {
        "name": "rollout-node-12-0", "role": "rollout", "node": "gpu-host-0123-2", "pid": 1234567, "state": "running",
        "incarnation": "18cfe2d7a9b04f31", "restarts": 12,
    },
    "stalls": {
        "since_s": 12.34, "process": "head.demo.trainer", "waiter": "trainer", "waits_for": "scheduler.demo",
        "kind": "ask", "what": "CommitStep",
    },
    "metrics": {
        "step": 12345, "policy_version": 12345, "reward_mean": 0.12345, "seconds": 123.4, "tokens_generated": 12345678,
        "staleness_max": 1, "restarts": 12,
    },
}  # fmt: skip


@pytest.mark.parametrize("op", list(ROWS))
def test_a_table_of_usual_rows_fits_100_columns(op: str) -> None:
    console = Console(width=100, force_terminal=False, record=True)
    with console.capture() as shown:
        print_result(console, op, [ROWS[op], ROWS[op]])
    lines = shown.get().splitlines()
    assert len(lines) == 3  # a heading and a line a row
    assert max(map(len, lines)) <= 100
