"""What engines say of their prefills, as columns of a step: each token once, whoever is told of it."""

from __future__ import annotations

import numpy as np

from actors.fleet.workers import Worker, WorkerTable
from actors.ledger import events as ev
from actors.ledger.ledger import Ledger
from actors.protocol.work import EngineStats, SamplingParams
from actors.protocol.workers import RegisterWorker
from actors.scheduler.meter import StepMeter
from transport.address import ActorAddress, PeerId


def said(prefilled: int, hits: int = 0, preempted: int = 0) -> EngineStats:
    return EngineStats(
        prefilled_tokens_total=prefilled, prefix_hit_tokens_total=hits, preemptions_total=preempted
    )  # fmt: skip


def register(table: WorkerTable, life: int = 1, *, again: bool = False) -> Worker:
    address = ActorAddress("w", PeerId("n.j.w", life))
    offer = RegisterWorker(job="j", worker=address, node="n", engine="e", slots=4, policy_version=0, again=again)
    return table.add(offer, 0.0)


def test_a_new_worker_counts_from_its_first_token_and_each_call_takes_what_is_new() -> None:
    table = WorkerTable()
    worker = register(table)
    table.heard(worker, said(100, 30), 1.0)
    table.heard(worker, said(150, 90, 3), 2.0)
    assert table.take_prefills() == {"prefilled_tokens": 150, "prefix_hit_tokens": 90, "preemptions": 3}
    table.heard(worker, said(155, 90, 3), 3.0)
    assert table.take_prefills() == {"prefilled_tokens": 5, "prefix_hit_tokens": 0, "preemptions": 0}


def test_one_that_is_back_goes_on_counting_where_it_was() -> None:
    table = WorkerTable()
    table.heard(register(table), said(100), 1.0)
    table.heard(register(table, again=True), said(130), 2.0)
    assert table.take_prefills()["prefilled_tokens"] == 130


def test_of_one_that_another_head_has_counted_only_what_comes_from_now_on_counts() -> None:
    table = WorkerTable()
    worker = register(table, again=True)
    table.heard(worker, said(100), 1.0)
    table.heard(worker, said(107), 2.0)
    assert table.take_prefills()["prefilled_tokens"] == 7


def test_another_life_begins_with_nothing() -> None:
    table = WorkerTable()
    table.heard(register(table), said(100), 1.0)
    table.heard(register(table, life=2), said(40), 2.0)
    assert table.take_prefills()["prefilled_tokens"] == 140


def test_a_step_has_what_was_prefilled_until_it_was_cut_and_the_least_that_there_was() -> None:
    ledger, table = Ledger(), WorkerTable()
    lengths, ids = np.array([3, 3], np.int32), np.array([7, 7, 8, 7, 7, 9], np.int32)
    ledger.apply(ev.BatchIssued(0, 1, SamplingParams(max_tokens=4), np.arange(2), lengths, ids, [b"", b""]))
    meter, worker = StepMeter(ledger, table, 0.0), register(table)
    table.heard(worker, said(4, 2, 1), 1.0)
    meter.cut()
    table.heard(worker, said(10, 2, 1), 2.0)
    row = meter.take(ledger.batches[0], 1, {}, 3.0)
    assert (row["prefilled_tokens"], row["prefix_hit_tokens"], row["distinct_prefix_tokens"]) == (4, 2, 4)
    assert row["preemptions"] == 1
    assert table.take_prefills() == {"prefilled_tokens": 6, "prefix_hit_tokens": 0, "preemptions": 0}, (
        "of the next step"
    )
