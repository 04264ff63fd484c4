"""``headrace bench serve``: what it makes of its figures, and real servers, as short as they can be."""

from __future__ import annotations

import json
from typing import Any

import pytest

pytest.importorskip("tinker")

from benchmarks.serving import serve
from benchmarks.serving._costs import fair_s
from benchmarks.serving._programs import Work, rows
from benchmarks.serving._survival import asked_operations

pytestmark = pytest.mark.filterwarnings("ignore")  # the client warns of its own next versions


def test_a_fair_share_is_a_core_each_while_there_are_enough_and_then_an_even_part() -> None:
    alone = {"a": 2.0, "b": 4.0, "c": 4.0}
    assert fair_s(alone, cores=3) == alone
    assert fair_s(alone, cores=2) == pytest.approx({"a": 3.0, "b": 5.0, "c": 5.0})
    assert fair_s(alone, cores=1) == pytest.approx({"a": 6.0, "b": 10.0, "c": 10.0})


def test_goals_that_are_missed_are_told_in_sentences() -> None:
    good: dict[str, Any] = {
        "together": {"slowdown_max": 1.1, "tenants": {"a": {"same_bits": True}, "b": {"same_bits": True}}},
        "overhead": {"wall": {"ratio": 1.04}, "cpu": {"ratio": 1.02}},
        "idle": {"bytes": 1_000_000},
    }
    assert serve.missed(good) == []
    bad = {
        "together": {"slowdown_max": 1.3, "tenants": {"a": {"same_bits": False}}},
        "overhead": {"wall": {"ratio": 1.2}, "cpu": {"ratio": 1.0}},
        "idle": {"bytes": 60_000_000},
    }
    assert serve.missed(bad) == [
        "a differs from the same program alone",
        "slowdown_max: 1.3, the goal is 1.2",
        "overhead.wall: 1.2, the goal is 1.05",
        "idle.bytes: 60000000, the goal is 50000000",
    ]


def test_a_program_asks_the_same_each_time_and_is_counted_as_the_client_cuts_it() -> None:
    work = Work(rank=8, seed=1, steps=20, calls=1, datums=2 * 1024 + 1, tokens=3, vocabulary=50)
    assert asked_operations(work) == 20 * (3 + 1) + 2
    asked = rows(work, 0)
    assert asked == rows(work, 0) != rows(work, 1)
    assert ({len(row) for row in asked}, len(asked)) == ({4}, work.datums)
    assert all(0 <= token < 50 for row in asked for token in row)


@pytest.mark.long
@pytest.mark.timeout(600)
def test_bench_serve_faults_finds_each_operation_once_and_no_bit_changed(capsys: pytest.CaptureFixture[str]) -> None:
    assert serve.main(["--faults", "--json", "--steps", "4", "--kills", "3", "--cores", "64"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["equal"] and found["asked"] == 4 * 4 + 2
    undisturbed, struck = found["undisturbed"], found["struck"]
    for what in ("losses", "weights", "executed"):
        assert undisturbed[what] == struck[what]
    assert struck["faults"]["kills"] == 3
    assert struck["faults"]["dropped"] > 0 and struck["faults"]["turned into 500"] > 0


@pytest.mark.long
@pytest.mark.timeout(600)
def test_bench_serve_compares_tenants_alone_and_together(capsys: pytest.CaptureFixture[str]) -> None:
    assert serve.main(["--json", "--small", "--calls", "3", "--idle", "12", "--cores", "64"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["together"]["bit_identical"]
    assert set(found["together"]["tenants"]) == {"first", "second", "whole"}
    assert found["overhead"]["wall"]["ratio"] > 0.5 and found["idle"]["tenants"] == 12
