"""The journal keeps a prefix of what was appended, in order, and survives damage at its tail."""

from __future__ import annotations

import asyncio
import dataclasses
import sqlite3
import threading
import typing
from pathlib import Path

import msgpack
import msgspec
import numpy as np
import pytest

from actors.ledger import events as ev
from actors.ledger.errors import JournalFailed, JournalUnreadable
from actors.ledger.journal import SqliteJournal, committed_samples
from actors.ledger.ledger import Ledger
from actors.ledger.memory_journal import MemoryJournal
from actors.protocol.evaluations import evaluation_step
from actors.protocol.work import SamplingParams
from configs.limits import DEFAULT_LIMITS


def issue(step: int, prompts: int = 2, group: int = 2, max_tokens: int = 4) -> ev.BatchIssued:
    return ev.BatchIssued(
        step, group, SamplingParams(max_tokens=max_tokens, stop_token_ids=(9,)),
        np.arange(step * prompts, (step + 1) * prompts), np.full(prompts, 2, np.int32),
        np.arange(2 * prompts, dtype=np.int32), [b"c"] * prompts,
    )  # fmt: skip


def run_step(ledger: Ledger, step: int) -> list[ev.Event]:
    """The events of one whole step of four samples, applied to ``ledger``."""
    rows, first = np.arange(4, dtype=np.int32), ledger.next_assignment
    report = ev.TokensAppended.one(
        "w", step, first + np.arange(4), np.zeros(4, np.int32), np.ones(4, np.int32), np.ones(4, np.uint8),
        np.full(4, 9, np.int32), np.zeros(4, np.float32),
    )  # fmt: skip
    prompts = np.repeat(np.arange(step * 2, step * 2 + 2), 2)
    todo: list[ev.Event] = [
        issue(step), ev.Assigned.to_one("w", step, first, rows), report, ev.Scored(step, rows, np.arange(4) / 4),
        ev.Granted(step, rows), ev.Committed(step, prompts, np.array([0, 1, 0, 1], np.int32), step + 1),
    ]  # fmt: skip
    for event in todo:
        ledger.apply(event)
    return todo


async def written(path: Path, steps: int) -> Ledger:
    ledger, journal = Ledger(), SqliteJournal(path, "j")
    opened = ev.Opened(1)
    ledger.apply(opened)
    journal.append(opened)
    for step in range(steps):
        for event in run_step(ledger, step):
            journal.append(event)
        journal.record(ledger.batches[step])
    await journal.close()
    return ledger


async def test_what_is_durable_replays_to_an_equal_ledger(tmp_path: Path) -> None:
    before = await written(tmp_path / "journal.db", 3)
    journal = SqliteJournal(tmp_path / "journal.db", "j")
    floor, events = journal.read()
    after = Ledger(floor)
    after.restore(events)
    await journal.close()
    assert after.committed_steps == 3 and after.counters == before.counters
    assert after.count_states() == before.count_states()
    rows = np.arange(4, dtype=np.int32)
    assert np.array_equal(after.batches[2].ragged(rows).tokens, before.batches[2].ragged(rows).tokens)


async def test_committed_samples_can_be_read_and_compared(tmp_path: Path) -> None:
    await written(tmp_path / "a.db", 2)
    await written(tmp_path / "b.db", 2)
    rows = committed_samples(tmp_path / "a.db")
    assert rows == committed_samples(tmp_path / "b.db")
    assert [(r.step, r.prompt, r.sibling) for r in rows[:3]] == [(0, 0, 0), (0, 0, 1), (0, 1, 0)]
    assert (rows[1].reward, rows[1].state, rows[1].finish, rows[1].n_tokens) == (0.25, "committed", "stop", 1)


async def test_a_torn_tail_ends_the_journal_and_not_the_run(tmp_path: Path) -> None:
    path = tmp_path / "journal.db"
    await written(path, 1)
    db = sqlite3.connect(path)
    db.execute("INSERT INTO events (seq, kind, job, step, body) VALUES (1000, 'scored', 'j', 1, x'93')")
    db.commit()
    db.close()
    journal = SqliteJournal(path, "j")
    _, events = journal.read()
    assert isinstance(events[-1], ev.Committed)
    await journal.close()


async def test_damage_before_the_durable_frontier_is_reported(tmp_path: Path) -> None:
    path = tmp_path / "journal.db"
    await written(path, 1)
    db = sqlite3.connect(path)
    db.execute("UPDATE events SET body = x'93' WHERE seq = 2")
    db.commit()
    db.close()
    journal = SqliteJournal(path, "j")
    with pytest.raises(JournalUnreadable, match="event 2"):
        journal.read()
    await journal.close()


async def test_a_file_of_another_kind_version_or_job_is_refused(tmp_path: Path) -> None:
    (tmp_path / "text.db").write_text("not a database at all, but long enough to be taken for one" * 10)
    with pytest.raises(JournalUnreadable, match="no journal"):
        SqliteJournal(tmp_path / "text.db", "j")
    await written(tmp_path / "journal.db", 1)
    with pytest.raises(JournalUnreadable, match="belongs to job 'j'"):
        SqliteJournal(tmp_path / "journal.db", "other")
    db = sqlite3.connect(tmp_path / "journal.db")
    db.execute("UPDATE meta SET value = '99' WHERE name = 'schema_version'")
    db.commit()
    db.close()
    with pytest.raises(JournalUnreadable, match="schema 99"):
        SqliteJournal(tmp_path / "journal.db", "j")


@pytest.mark.parametrize("kind", ["sqlite", "memory"])
async def test_a_pruned_journal_replays_from_its_floor(tmp_path: Path, kind: str) -> None:
    ledger = Ledger()
    path = tmp_path / "journal.db"
    journal = SqliteJournal(path, "j") if kind == "sqlite" else MemoryJournal("j")
    for event in [ev.Opened(1)]:
        ledger.apply(event)
        journal.append(event)
    ledger.counters.prompts_lost = 0
    for step in range(4):
        for event in run_step(ledger, step):
            journal.append(event)
    checkpoint = ev.Checkpointed(2, "p", {"tokens": ledger.counters.tokens})
    learned = ev.WindowLearned(1, 2.5, 3, {1: 4.0, 2: 2.5})
    for event in (checkpoint, learned):
        ledger.apply(event)
        journal.append(event)
    journal.prune(2)
    await journal.durable()
    floor, events = journal.read()
    await journal.close()
    assert floor == 2 and sum(isinstance(e, ev.BatchIssued) for e in events) == 2
    after = Ledger(floor)
    after.restore(events)
    assert after.committed_steps == 4 and sorted(after.batches) == [2, 3]
    assert after.counters.prompts_lost == 0 and after.counters.samples_trained_twice == 0
    assert after.counters.tokens == ledger.counters.tokens
    assert after.window == learned
    after.apply(ev.Opened(2))
    after.apply(ev.Rewound(2))
    run_replay = ev.Granted(2, np.arange(4, dtype=np.int32), replay=True)
    after.apply(run_replay)


async def test_an_evaluation_that_goes_on_after_a_restart_is_not_pruned_before_it_is_over(tmp_path: Path) -> None:
    """A head that comes back during an evaluation appends its tokens before any event of a training step."""
    ledger, path, rows = Ledger(), tmp_path / "journal.db", np.arange(4, dtype=np.int32)
    journal = SqliteJournal(path, "j")

    def happens(*events: ev.Event) -> None:
        for event in events:
            ledger.apply(event)
            journal.append(event)

    happens(ev.Opened(1))
    for step in range(3):
        for event in run_step(ledger, step):
            journal.append(event)
    batch = evaluation_step(3)
    happens(issue(3), msgspec.structs.replace(issue(0), step=batch))
    await journal.close()
    journal = SqliteJournal(path, "j")
    happens(ev.Opened(2))
    first = ledger.next_assignment
    happens(ev.Assigned.to_one("w", batch, first, rows))
    happens(ev.TokensAppended.one(
        "w", 3, first + np.arange(4), np.zeros(4, np.int32), np.ones(4, np.int32), np.ones(4, np.uint8),
        np.full(4, 9, np.int32), np.zeros(4, np.float32),
    ))  # fmt: skip
    happens(ev.Assigned.to_one("w", 3, ledger.next_assignment, rows), ev.Scored(batch, rows, np.arange(4) / 4))
    journal.prune(2)
    await journal.close()
    journal = SqliteJournal(path, "j")
    floor, events = journal.read()
    await journal.close()
    after = Ledger(floor)
    after.restore(events)
    assert (after.batches[batch].state == ledger.batches[batch].state).all()


def with_the_next_batch_before_the_tokens(steps: int) -> list[ev.Event]:
    """Of whole steps, each batch issued while the step before it is generated, as a run reads ahead."""
    events: list[ev.Event] = []
    scratch = Ledger()
    scratch.apply(ev.Opened(1))
    for step in range(steps):
        issued, *others = run_step(scratch, step)
        at = max((i for i, event in enumerate(events) if isinstance(event, ev.TokensAppended)), default=0)
        events[at:at] = [issued]
        events += others
    return [ev.Opened(1), *events]


@pytest.mark.parametrize("kind", ["sqlite", "memory"])
async def test_a_pruned_journal_counts_ignored_rows_as_the_run_did(tmp_path: Path, kind: str) -> None:
    """Tokens of a pruned step are kept with the batch that had been issued by then, without their hand-out."""
    ledger, journal = Ledger(), SqliteJournal(tmp_path / "journal.db", "j") if kind == "sqlite" else MemoryJournal("j")

    def happens(*events: ev.Event) -> None:
        for event in events:
            ledger.apply(event)
            journal.append(event)

    run = with_the_next_batch_before_the_tokens(4)
    late = next(event for event in reversed(run) if isinstance(event, ev.TokensAppended))
    happens(*run, late)
    happens(ev.Checkpointed(3, "p", dataclasses.asdict(ledger.counters)), late)
    journal.prune(3)
    await journal.durable()
    floor, events = journal.read()
    await journal.close()
    after = Ledger(floor)
    after.restore(events)
    assert ledger.counters.unknown_rows == 2 * len(late.assignments)
    assert [sum(isinstance(event, tag) for event in events) for tag in (ev.Assigned, ev.TokensAppended)] == [1, 4]
    assert after.counters == ledger.counters


async def test_a_crash_of_the_memory_journal_loses_only_what_was_not_durable() -> None:
    journal, ledger = MemoryJournal(), Ledger()
    journal.append(ev.Opened(1))
    await journal.durable()
    ledger.apply(ev.Opened(1))
    for event in run_step(ledger, 0):
        journal.append(event)
    journal.crash(keep=2)
    assert [type(e).__name__ for e in journal.read()[1]] == ["Opened", "BatchIssued", "Assigned"]


async def test_others_read_a_journal_while_it_is_written(tmp_path: Path) -> None:
    journal = SqliteJournal(tmp_path / "journal.db", "j")
    reader = sqlite3.connect(tmp_path / "journal.db", timeout=0)
    assert reader.execute("PRAGMA journal_mode").fetchone() == ("wal",)
    reader.execute("BEGIN")
    assert reader.execute("SELECT count(*) FROM events").fetchone() == (0,)
    journal.append(ev.Opened(1))
    await journal.durable()  # a reader does not hold it up either
    reader.close()
    await journal.close()


async def test_what_is_durable_was_synced_and_what_is_only_flushed_need_not_be(tmp_path: Path) -> None:
    """FULL (2) survives a power cut; NORMAL (1) the death of the process alone. OFF (0) survives neither."""
    journal = SqliteJournal(tmp_path / "journal.db", "j")

    def synchronous() -> int:
        return journal._db.execute("PRAGMA synchronous").fetchone()[0]

    journal.append(ev.Opened(1))
    await asyncio.wrap_future(journal._flush(sync=False))
    assert synchronous() == 1
    journal.append(ev.Opened(2))
    await journal.durable()
    assert synchronous() == 2
    await journal.close()


async def test_a_write_that_fails_is_told_as_such_and_nothing_is_taken_after_it(tmp_path: Path) -> None:
    journal = SqliteJournal(tmp_path / "journal.db", "j")
    journal._db.execute("PRAGMA max_page_count=1")  # the disk is full
    batch = issue(0, prompts=4000)
    journal.append(batch)
    with pytest.raises(JournalFailed, match="full"):
        await journal.durable()
    await asyncio.sleep(0)
    for later in (lambda: journal.append(ev.Opened(2)), lambda: journal.prune(0)):
        with pytest.raises(JournalFailed, match="full"):
            later()
    with pytest.raises(JournalFailed, match="full"):
        await journal.room()
    await journal.close()


def tokens(count: int) -> ev.TokensAppended:
    """Of a sample that nobody has been given: the journal does not look."""
    one, zero = np.ones(1, np.int32), np.zeros(1, np.int32)
    ids, logprobs = np.zeros(count, np.int32), np.zeros(count, np.float32)
    return ev.TokensAppended.one("w", 0, one.astype(np.int64), zero, count * one, zero.astype(np.uint8), ids, logprobs)


async def test_nothing_is_durable_behind_a_write_that_failed_before_anybody_was_told(tmp_path: Path) -> None:
    """A large write fails on the writer's thread while a small one, which would fit, waits behind it."""
    journal = SqliteJournal(tmp_path / "journal.db", "j")
    journal.append(ev.Opened(1))
    await journal.durable()
    pages = journal._db.execute("PRAGMA page_count").fetchone()[0]
    journal._db.execute(f"PRAGMA max_page_count={pages + 3}")
    journal.append(tokens(1 << 20))
    journal._on_timer()
    journal.append(ev.Paused(True))
    with pytest.raises(JournalFailed, match="full"):
        await journal.durable()
    await journal.close()
    assert SqliteJournal(tmp_path / "journal.db", "j").read() == (0, [ev.Opened(1)])


async def test_whoever_stops_waiting_for_the_disk_takes_nothing_back(tmp_path: Path) -> None:
    """Else what was appended before would be missing, and what comes after it would not."""
    journal, busy = SqliteJournal(tmp_path / "journal.db", "j"), threading.Event()
    journal._writer.submit(busy.wait, 10)
    journal.append(ev.Opened(1))
    waiting = asyncio.create_task(journal.durable())
    await asyncio.sleep(0)
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)
    journal.append(ev.Opened(2))
    busy.set()
    await journal.close()
    assert SqliteJournal(tmp_path / "journal.db", "j").read() == (0, [ev.Opened(1), ev.Opened(2)])


async def test_what_waits_for_the_disk_is_bounded_and_then_whoever_adds_to_it_waits(tmp_path: Path) -> None:
    limits = DEFAULT_LIMITS.model_copy(update={"journal_queue_bytes": 1000, "journal_flush_s": 0.01})
    journal = SqliteJournal(tmp_path / "journal.db", "j", limits)
    journal.append(ev.Opened(1))
    await journal.room()
    journal.append(issue(0, prompts=200))
    waiting = asyncio.create_task(journal.room())
    await asyncio.sleep(0)
    assert not waiting.done()
    async with asyncio.timeout(5):
        await waiting
    assert journal._unwritten_bytes < 1000
    await journal.close()


async def test_a_disk_that_confirms_nothing_has_failed(tmp_path: Path) -> None:
    limits = DEFAULT_LIMITS.model_copy(update={"journal_stall_s": 0.02})
    journal, hangs = SqliteJournal(tmp_path / "journal.db", "j", limits), threading.Event()
    journal._writer.submit(hangs.wait, 10)
    journal.append(ev.Opened(1))
    try:
        async with asyncio.timeout(5):
            with pytest.raises(JournalFailed, match="did not confirm within"):
                await journal.durable()
        with pytest.raises(JournalFailed, match="did not confirm within"):
            journal.append(ev.Opened(2))
    finally:
        hangs.set()
    journal._writer.submit(journal._db.close)
    journal._writer.shutdown()


def test_bytes_that_are_nested_without_end_are_no_event() -> None:
    """As damage may make them: a level for each byte."""
    with pytest.raises(ValueError, match="nested too deeply"):
        ev.decode_event(b"\x81\xa1a" + b"\x91" * 100_000)


def test_an_encoded_event_can_be_read_by_plain_msgpack() -> None:
    body = msgpack.unpackb(ev.encode_event(issue(0)))
    assert body["type"] == "batch_issued" and body["prompts"].code == 2


ON_DISK = {
    "assigned": "step first workers counts rows again",
    "batch_extended": "step prompts prompt_lengths prompt_ids contexts",
    "batch_issued": "step group_size sampling prompts prompt_lengths prompt_ids contexts episodes",
    "checkpointed": "step path counters final",
    "committed": "step prompts siblings policy_version",
    "dropped": "step rows reason",
    "episode_cut": "step rows lengths",
    "episodes_begun": "step rows",
    "episodes_ended": "step rows rewards parts cause keeps_turn",
    "leased": "step rows replay",
    "opened": "epoch",
    "paused": "paused",
    "returned": "worker assignments reason blame crashed",
    "evaluated": "step figures",
    "rewound": "step",
    "scored": "step rows rewards parts",
    "stopping": "stopping",
    "suspected": "worker steps rows",
    "tokens_appended": "workers versions row_counts assignments offsets counts finished tokens logprobs routes",
    "turned": "step rows offsets fresh counts tokens limits",
    "window_learned": "step seed_s target memory",
}
"""Tags and fields of the events in journals of 0.1, whatever they are called in the code today."""


def test_events_have_on_disk_the_names_of_the_journals_that_exist() -> None:
    """A renamed class or field must keep its old name in the journal, or runs of before cannot be resumed."""
    kinds = typing.get_args(ev.Event)
    found = {kind.__struct_config__.tag: " ".join(kind.__struct_encode_fields__) for kind in kinds}
    assert found == ON_DISK
