"""The operation log: what is stored once, what a crash leaves, what is damaged, what is deleted."""

from __future__ import annotations

import asyncio
import sqlite3
from pathlib import Path

import pytest

from actors.tinker import operations as op
from actors.tinker.errors import LogFailed, LogUnreadable
from actors.tinker.operation_log import OperationLog, Outcome, SamplerRow, Spent, WeightsRow
from configs.limits import DEFAULT_LIMITS, Limits
from tests.actors.tinker.tinker_world import BASE, call, spec, step

DONE = op.Json({"metrics": {}})
SPENT = Spent("alice", "s-1:train:0")


def opened(directory: Path, limits: Limits = DEFAULT_LIMITS) -> OperationLog:
    return OperationLog(directory / "operations.db", limits, server_id="s")


async def with_model(directory: Path, limits: Limits = DEFAULT_LIMITS) -> tuple[OperationLog, str]:
    log = opened(directory, limits)
    session = await log.begin_session("alice", {})
    row = await log.add_model(f"{session.id}:train:0", "alice", session.id, spec(), {})
    return log, row.id


async def test_what_was_stored_and_committed_is_there_in_the_next_life(tmp_path):
    log, model = await with_model(tmp_path)
    for seq, one in enumerate([op.Create(), call(1), step(), call(2)]):
        assert await log.store(model, seq, op.encode(one))
        assert not await log.store(model, seq, op.encode(call(9))), "a repeat changes nothing"
    await log.commit(model, 0, Outcome(DONE), SPENT)
    await log.commit(model, 1, Outcome(DONE, replays=True), SPENT)
    log.close()

    log = opened(tmp_path)
    [row] = await log.models()
    assert (row.id, row.tenant, row.spec, row.done, row.saved, row.state) == (model, "alice", spec(), 1, -1, None)
    assert [(line, seq) for line, seq, _ in await log.waiting()] == [(model, 2), (model, 3)]
    assert await log.to_replay(model) == [1]
    assert await log.operation(model, 1) == call(1)
    assert await log.answer(model, 1) == DONE
    assert await log.answer(model, 2) is None
    log.close()


async def test_a_saved_state_is_named_with_its_operation_and_deletes_the_bodies_before_it(tmp_path):
    log, model = await with_model(tmp_path)
    for seq, one in enumerate([op.Create(), call(1), step()]):
        await log.store(model, seq, op.encode(one))
    await log.commit(model, 0, Outcome(DONE), SPENT)
    await log.commit(model, 1, Outcome(DONE, replays=True), SPENT)
    await log.commit(model, 2, Outcome(DONE, state="models/1/state-2"), SPENT)
    row = await log.model(model)
    assert row is not None
    assert (row.done, row.saved, row.state) == (2, 2, "models/1/state-2")
    assert await log.to_replay(model) == []
    with pytest.raises(LogUnreadable, match="missing"):
        await log.operation(model, 1)
    assert await log.answer(model, 1) == DONE
    log.close()


async def test_an_operation_is_not_committed_out_of_turn_nor_twice(tmp_path):
    log, model = await with_model(tmp_path)
    await log.store(model, 1, op.encode(call(1)))
    with pytest.raises(AssertionError, match="operation 1 is committed after"):
        await log.commit(model, 1, Outcome(DONE), SPENT)
    await log.store(model, 0, op.encode(op.Create()))
    await log.commit(model, 0, Outcome(DONE), SPENT)
    with pytest.raises(AssertionError):
        await log.commit(model, 0, Outcome(op.Failed("no", of_user=True)), SPENT)
    assert await log.answer(model, 0) == DONE, "what was refused of a transaction leaves nothing"
    log.close()


async def test_many_callers_share_transactions_and_one_error_is_its_callers_alone(tmp_path):
    log, model = await with_model(tmp_path)
    stored = [log.store(model, seq, op.encode(call(seq))) for seq in range(50)]
    results = await asyncio.gather(*stored, log.commit(model, 7, Outcome(DONE), SPENT), return_exceptions=True)
    assert results[:50] == [True] * 50
    assert isinstance(results[50], AssertionError)
    assert len(await log.waiting()) == 50
    log.close()


@pytest.mark.parametrize("column", ["body", "answer"])
async def test_a_damaged_operation_is_told_of_and_not_executed(tmp_path, column):
    log, model = await with_model(tmp_path)
    await log.store(model, 0, op.encode(call(1)))
    await log.commit(model, 0, Outcome(DONE, replays=True), SPENT)
    log.close()
    with sqlite3.connect(tmp_path / "operations.db") as db:
        [value] = db.execute(f"SELECT {column} FROM operations").fetchone()
        db.execute(f"UPDATE operations SET {column} = ?", (value[:-1] + bytes([value[-1] ^ 1]),))
    log = opened(tmp_path)
    with pytest.raises(LogUnreadable, match=f"operation 0 of {model} is damaged"):
        await (log.operation(model, 0) if column == "body" else log.answer(model, 0))
    log.close()


@pytest.mark.parametrize("content", [b"no database at all, but long enough to be read as one" * 99, b""])
async def test_a_file_that_is_no_log_is_refused_and_an_empty_one_is_begun(tmp_path, content):
    (tmp_path / "operations.db").write_bytes(content)
    if content:
        with pytest.raises(LogUnreadable, match="is no operation log"):
            opened(tmp_path)
    else:
        opened(tmp_path).close()


async def test_a_log_of_another_version_is_refused(tmp_path):
    opened(tmp_path).close()
    with sqlite3.connect(tmp_path / "operations.db") as db:
        db.execute("UPDATE meta SET value = '99' WHERE name = 'version'")
    with pytest.raises(LogUnreadable, match="version 99, not 1"):
        opened(tmp_path)


async def test_a_log_that_cannot_be_written_fails_now_and_later(tmp_path):
    log, model = await with_model(tmp_path)
    log._writer._db.execute("PRAGMA query_only = ON")
    for _ in range(2):
        with pytest.raises(LogFailed, match="cannot be written"):
            await log.store(model, 0, b"")
    log.close()


async def test_answers_are_kept_within_bounds_and_those_to_be_replayed_keep_their_row(tmp_path):
    log, model = await with_model(tmp_path, DEFAULT_LIMITS.model_copy(update={"tinker_answers": 10}))
    await log.store(model, 0, op.encode(call(0)))
    await log.commit(model, 0, Outcome(DONE, replays=True), SPENT)
    for seq in range(1, 129):
        await log.store(model, seq, op.encode(call(seq)))
        await log.commit(model, seq, Outcome(DONE), SPENT)
    assert await log.answer(model, 117) is None
    assert await log.answer(model, 119) == DONE
    assert await log.to_replay(model) == [0]
    assert await log.answer(model, 0) == DONE
    log.close()


async def test_a_session_that_ends_takes_its_operations_along_and_leaves_what_has_a_name(tmp_path):
    log, model = await with_model(tmp_path)
    session = model.partition(":")[0]
    await log.store(model, 0, op.encode(op.Save("end")))
    named = WeightsRow(model, "weights", "end", "models/1/weights-0")
    unnamed = SamplerRow("one", "alice", session, BASE, model=model, directory="models/1/sampler-0")
    await log.commit(model, 0, Outcome(DONE, weights=named, sampler=unnamed, state="models/1/state-0"), SPENT)
    assert set(await log.directories()) == {"models/1/weights-0", "models/1/sampler-0", "models/1/state-0"}
    await log.end_session(session)
    assert set(await log.directories()) == {"models/1/weights-0"}
    assert await log.models() == []
    assert await log.samplers() == []
    assert await log.answer(model, 0) is None
    assert await log.weights(model, "weights", "end") == named
    log.close()


async def test_weights_go_when_their_time_is_over(tmp_path):
    log, model = await with_model(tmp_path)
    for seq, (name, expires_at) in enumerate([("short", 10.0), ("long", 20.0), ("ever", None)]):
        await log.store(model, seq, op.encode(op.Save(name)))
        await log.commit(model, seq, Outcome(DONE, weights=WeightsRow(model, "weights", name, name, expires_at)), SPENT)
    assert await log.expire_weights(15.0) == 1
    assert set(await log.directories()) == {"long", "ever"}
    assert await log.count_weights("alice") == 2
    assert await log.count_weights("bob") == 0
    log.close()
