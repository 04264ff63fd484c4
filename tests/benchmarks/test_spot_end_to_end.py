"""``headrace bench spot`` on real processes, as short as it can be; and what it makes of a trace and of events."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest

from benchmarks._processes import ROOT
from benchmarks.jobs import spot
from benchmarks.papers.traces import write_trace
from configs.loader import load_job
from supervisors.preparation.model_preparation import prepare_model
from supervisors.providers.trace_files import read_trace


def test_the_trace_that_is_replayed_is_as_long_as_asked_for_and_warns_of_every_second_end(tmp_path: Path) -> None:
    trace = spot.trace_of(spot.parse([]))
    write_trace(trace, tmp_path / "trace.csv")
    again = read_trace(tmp_path / "trace.csv")
    assert [(event.node, event.what) for event in again.events] == [(e.node, e.what) for e in trace.events]
    assert trace.length_s == 600 and max(event.at_s for event in trace.events) < 600
    killed = {event.node for event in trace.events if event.what == "kill"}
    warned = {event.node for event in trace.events if event.what == "notice"}
    assert warned and killed - warned


def test_machines_and_samples_are_counted_by_what_the_record_says() -> None:
    events = [
        {"event": "node_joined", "node": "a"},
        {"event": "node_joined", "node": "b"},
        {"event": "node_draining", "node": "a"},
        {"event": "worker_draining", "samples": 7},
        {"event": "samples_taken_back", "samples": 5},
        {"event": "node_left", "node": "a"},
        {"event": "samples_returned", "samples": 3},
        {"event": "node_left", "node": "b"},
    ]
    assert spot.machines(events) == {
        "machines_joined": 2, "machines_left": 2, "machines_noticed": 1, "machines_killed": 1,
    }  # fmt: skip
    assert spot.moved(events) == {
        "samples_held_at_notice": 7, "samples_taken_back": 5, "samples_returned": 3, "samples_balanced": 0,
    }  # fmt: skip
    met = dict.fromkeys(spot.GOALS, 0)
    assert spot.missed(met) == []
    assert spot.missed(met | {"samples_lost": 1}) == ["samples_lost: 1, the goal is 0"]


@pytest.mark.long
@pytest.mark.timeout(900)
def test_bench_spot_ends_with_nothing_lost_nothing_twice_and_what_it_cost(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    trace = tmp_path / "two.csv"
    trace.write_text("at_s,node,event,kind\n0,a,up,spot\n0,b,up,spot\n14,a,kill,spot\n14,b,kill,spot\n")
    short = ["model.hidden=32", "model.layers=1", "limits.hand_over_s=0.5", "trainer.backend=simulated"]
    job = load_job(ROOT / "benchmarks" / "jobs" / "spot.yaml", [*short, f"provider.trace={trace}"])
    model = asyncio.run(prepare_model(job, tmp_path))
    sets = [word for setting in short for word in ("--set", setting)]
    replay = ["--trace", str(trace), "--part", "1", "--speed", "1", "--notice-s", "2", "--seconds", "20"]
    assert spot.main([*sets, *replay, "--alone-s", "5", "--json", "--model", str(model)]) == 0
    told = json.loads(capfd.readouterr().out)
    assert (told["samples_lost"], told["samples_twice"], told["violations"]) == (0, 0, 0)
    assert told["machines_joined"] == told["machines_left"] == 2
    assert told["counted"]["samples"] >= told["steps"] * 64
    alone = told["reserved_only"]
    assert told["cost_per_token_ratio"] == pytest.approx(
        told["cost_per_million_tokens"] / alone["cost_per_million_tokens"], abs=2e-3
    )
