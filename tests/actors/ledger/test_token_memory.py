"""What a token costs in memory, from the wire to the commit: docs/concepts/ledger_and_exactly_once.md states it."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import numpy as np

from actors.fleet.inflow import joined
from actors.ledger import events as ev
from actors.ledger.batch import StepBatch
from actors.ledger.journal import SqliteJournal
from actors.protocol.tokens import TokenReport
from actors.protocol.work import EngineStats, SamplingParams
from configs.limits import DEFAULT_LIMITS

TOKEN_BYTES, ROW_BYTES = 12, 64
"""In the ledger: id, log-probability, version; and what a sample has besides its tokens."""


def report(samples: int) -> TokenReport:
    n = np.zeros(samples, np.int32)
    return TokenReport.of(
        np.arange(samples), n, n + 1, n, n, n, job="j", worker="w", term=1, sequence=0, policy_version=0,
        stats=EngineStats(),
    )  # fmt: skip


def test_a_sample_costs_twelve_bytes_a_token_and_nothing_that_grows_with_its_steps() -> None:
    prompts, tokens = 8, 1000
    issued = ev.BatchIssued(
        0, 4, SamplingParams(max_tokens=tokens), np.arange(prompts), np.zeros(prompts, np.int32),
        np.zeros(0, np.int32), [b""] * prompts,
    )  # fmt: skip
    batch = StepBatch(issued)
    rows = np.arange(len(batch), dtype=np.int32)
    assert held(batch) <= len(batch) * (TOKEN_BYTES * tokens + ROW_BYTES)
    before = held(batch)
    for at in range(100):
        batch.put(rows, np.full(len(rows), at), np.ones(len(rows), np.int32), rows, rows, 0)
    batch.length[:] = 100
    assert held(batch) == before
    batch.archive()
    assert batch.ragged(rows).tokens.nbytes * 3 == len(batch) * TOKEN_BYTES * 100
    assert held(batch) <= len(batch) * ROW_BYTES + 1024


def test_a_row_costs_memory_for_the_pages_that_it_has_reached_and_not_for_its_budget() -> None:
    """Of 400 MB of budget, a token in each row makes three pages of 4 KiB a row resident, not huge ones."""
    prompts, siblings, budget = 64, 16, 32_768
    issued = ev.BatchIssued(
        0, siblings, SamplingParams(max_tokens=budget), np.arange(prompts), np.zeros(prompts, np.int32),
        np.zeros(0, np.int32), [b""] * prompts,
    )  # fmt: skip
    batch = StepBatch(issued)
    rows, before = np.arange(len(batch), dtype=np.int32), resident_bytes()
    batch.put(rows, np.zeros(len(rows), np.int32), np.ones(len(rows), np.int32), rows, rows, 0)
    assert resident_bytes() - before < 2 * len(batch) * 3 * 4096
    assert batch.held(5).dtype == np.int32 and batch.newest_version(rows) == -1, "no length was given to any row"


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def held(batch: StepBatch) -> int:
    return sum(column.nbytes for column in vars(batch).values() if isinstance(column, np.ndarray))


def test_a_token_costs_25_bytes_on_the_wire_and_in_the_journal() -> None:
    one, many = report(1000), joined([report(1000)] * 64)
    assert len(one.row_bytes) + len(one.token_bytes) == 25 * 1000
    assert len(ev.encode_event(many)) <= 25 * 64_000 + 2048


async def test_what_waits_for_the_disk_is_bounded_in_bytes(tmp_path: Path) -> None:
    event = joined([report(1000)])
    limits = DEFAULT_LIMITS.model_copy(update={"journal_queue_bytes": 100_000, "journal_flush_s": 0.05})
    journal = SqliteJournal(tmp_path / "journal.db", "j", limits)
    for _ in range(3):
        journal.append(event)
    await journal.room()
    journal.append(event)
    waiting = asyncio.create_task(journal.room())
    await asyncio.sleep(0)
    assert not waiting.done(), "four events of 25 KB are as much as may wait"
    await waiting
    assert len(journal.read()[1]) == 4
    await journal.close()
