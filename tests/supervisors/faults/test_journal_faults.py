"""A full disk fails the journal as SQLite would, and loses nothing that had been confirmed."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from actors.ledger import events as ev
from actors.ledger.errors import JournalFailed
from configs.limits import DEFAULT_LIMITS
from supervisors.faults.journal_faults import FaultableJournal
from supervisors.machine.machine import LocalMachine
from tests.actors.scheduler_world import config


def journal(path: Path, full: set[Path]) -> FaultableJournal:
    return FaultableJournal(path, "j", DEFAULT_LIMITS, full)


async def test_writes_fail_while_the_disk_is_full_and_go_on_with_the_next_journal(tmp_path: Path) -> None:
    path, full = tmp_path / "journal.db", set[Path]()
    first = journal(path, full)
    assert first.read() == (0, [])
    first.append(ev.Opened(1))
    await first.durable()

    full.add(path)
    first.append(ev.Opened(2))
    with pytest.raises(JournalFailed, match="database or disk is full"):
        await first.durable()
    with pytest.raises(JournalFailed):
        first.append(ev.Opened(3))
    await first.close()

    second = journal(path, full)
    with pytest.raises(JournalFailed, match="cannot be opened: database or disk is full") as caught:
        second.read()
    assert not caught.value.permanent, "there is room again soon: the scheduler is started until then"
    await second.close()

    full.clear()
    third = journal(path, full)
    assert third.read() == (0, [ev.Opened(1)]), "what was confirmed is there, what was refused is not"
    third.append(ev.Scored(0, np.zeros(1, np.int32), np.zeros(1)))
    await third.durable()
    await third.close()


async def test_another_journals_full_disk_is_not_ours(tmp_path: Path) -> None:
    ours = journal(tmp_path / "journal.db", {tmp_path / "other.db"})
    ours.read()
    ours.append(ev.Opened(1))
    await ours.durable()
    await ours.close()


def test_this_machines_journals_can_be_filled_up(tmp_path: Path) -> None:
    machine = LocalMachine()
    made = machine.journal(config(), tmp_path)
    machine.full_disks.add(tmp_path / "journal.db")
    assert made is not None
    with pytest.raises(JournalFailed):
        made.read()
