"""Real runs whose pool changes: samples move between healthy workers, the pool follows the gap between the stages."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from small_job import TORCH_TRAINER, simulated_job, simulated_rollout

from actors.ledger import events as ev
from actors.protocol.work import SamplingParams
from actors.rollout.engine import GenerationRequest
from actors.rollout.engines.simulated_engine import whole_response
from actors.rollout.worker_spec import engine_spec
from supervisors.checkers.followed import Name
from supervisors.checkers.history import History
from supervisors.checkers.replay import Replay
from supervisors.checkers.run_directory import read_history
from supervisors.testing.run_under_test import HeadraceRun

StartRun = Callable[..., HeadraceRun]


@dataclass
class Told:
    """What a journal tells of the samples that were handed out more than once, and of what workers have said."""

    moved: dict[Name, list[int]] = field(default_factory=dict[Name, list[int]])
    """Sample → the tokens with which it was handed out for the second time."""
    left: dict[Name, str] = field(default_factory=dict[Name, str])
    """Sample → the worker that had it before that."""
    samples: list[tuple[Name, list[int]]] = field(default_factory=list[tuple[Name, list[int]]])
    said_tokens: int = 0
    """In reports, whether the ledger took them or not."""
    sampling: SamplingParams | None = None

    @classmethod
    def by(cls, history: History) -> Told:
        told, replay = cls(), Replay()
        for event in history.ledger:
            if isinstance(event, ev.Assigned):
                rows = [replay.batches[event.step].samples[row] for row in event.rows.tolist()]
                moved = [s for s in rows if s.workers and s.name not in told.moved]
                told.moved |= {s.name: list(s.tokens) for s in moved}
                told.left |= {s.name: s.workers[-1] for s in moved}
            elif isinstance(event, ev.TokensAppended):
                told.said_tokens += len(event.tokens)
            elif isinstance(event, ev.BatchIssued):
                told.sampling = event.sampling
            replay.fold(event)
        told.samples = [(sample.name, sample.tokens) for sample in replay.samples]
        return told


def check_tokens(run: HeadraceRun) -> Told:
    """Every sample has the tokens that it would have had in place, and none of them was generated twice."""
    history = read_history(run.run_dir)
    told, spec = Told.by(history), engine_spec(history.job, "")
    assert told.sampling is not None and told.samples
    for name, tokens in told.samples:
        whole = GenerationRequest(
            request=0, prompt=name.prompt, sibling=name.sibling, prompt_ids=np.ones(1, np.int32),
            generated=np.empty(0, np.int32), sampling=told.sampling,
        )  # fmt: skip
        assert tokens == whole_response(whole, spec.options, spec.max_context_tokens), name
    assert told.said_tokens == sum(len(tokens) for _, tokens in told.samples)
    return told


def elastic_job(model: Path, *, options: dict[str, float], rollout: dict[str, Any], **sections: Any) -> dict[str, Any]:
    plain = simulated_rollout(model)
    engine = {"engine_options": plain["engine_options"] | options}
    return simulated_job(model, rollout=plain | engine | rollout, checkpoint={"every": 0}, **sections)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("what", ["running", pytest.param("pending", marks=pytest.mark.long)])
def test_samples_move_to_a_worker_that_comes_in_the_middle_of_a_step(
    what: str, headrace_run: StartRun, small_model: Path
) -> None:
    """Engines take 8 ms a sequence: beyond ten of them a batch gains next to nothing.

    ``pending``: the cache of an engine holds a part of what it is given, and the rest waits there, for longer than
    a worker takes to come.
    """
    prompts = 10 if what == "pending" else 6
    options = {"base_s": 0.004, "decode_s": 0.008, "mean_tokens": 60.0} | (
        {"kv_tokens": 200.0} if what == "pending" else {}
    )
    rollout = {"workers": 1, "max_running": 40, "max_tokens": 64}
    job = elastic_job(
        small_model,
        options=options,
        rollout=rollout,
        steps=3,
        scheduling={"policy": "rlboost"},
        algorithm={"group_size": 4, "prompts_per_step": prompts},
    )
    run = headrace_run(job)
    run.wait_for_step(0)  # by then it is known from which batch on throughput hardly grows
    run.call("scale", {"workers": 2})
    summary = run.finish(timeout_s=120)
    assert (summary["prompts_lost"], summary["samples_trained_twice"]) == (0, 0)

    told = check_tokens(run)
    ordered = run.events("samples_balanced")
    first = next(move for move in ordered if bool(move["running"]) == (what == "running"))
    assert (first["worker"], first["target"]) == ("rollout-0", "rollout-1")
    assert 0 < len(told.moved) <= sum(move["samples"] for move in ordered)
    assert what == "pending" or any(told.moved.values()), "what had run goes on behind its tokens"


@pytest.mark.long
@pytest.mark.timeout(300)
def test_the_pool_follows_the_gap_between_the_stages_through_the_provider(
    headrace_run: StartRun, small_model: Path, tmp_path: Path
) -> None:
    """Of three machines two are taken. A slowed trainer has one of them given back, its recovery has the third taken.

    Generation is the slower stage with three workers too, but not where the trainer takes fifty times as long.
    """
    trace = tmp_path / "three.csv"
    trace.write_text("at_s,node,event,kind\n" + "\n".join(f"0,{name},up,spot" for name in "abc"))
    job = elastic_job(
        small_model,
        options={"base_s": 0.006, "mean_tokens": 12.0},
        rollout={"workers": 1, "max_running": 6, "max_tokens": 24},
        **TORCH_TRAINER,
        steps=100_000,
        algorithm={"group_size": 4, "prompts_per_step": 12},
        sync={"mode": "async"},
        scheduling={"policy": "rlboost", "workers_max": 3},
        cluster={"place_rollout": "elastic"},
        provider={"kind": "local", "trace": str(trace)},
    )
    run = headrace_run(job)
    for machine in "ab":
        run.wait_for_event("worker_began", worker=f"rollout-{machine}")
    run.inject("slow", "trainer", factor=48, lasts_s=15.0)
    run.wait_for_event("pool_resized", workers=3, wanted=2)
    run.wait_for_event("node_left")
    run.wait_for_event("worker_began", worker="rollout-c")
    run.interrupt()
    summary = run.finish(state="interrupted", timeout_s=120)
    assert (summary["prompts_lost"], summary["samples_trained_twice"]) == (0, 0)
    joined = [row["node"] for row in run.events("node_joined")]
    assert (set(joined[:2]), joined[2]) == ({"a", "b"}, "c")
    ways = [row["wanted"] > row["workers"] for row in run.events("pool_resized")]
    assert ways == sorted(ways) and len(set(ways)) == 2, "first down, then up, without swinging"


@pytest.mark.timeout(300)
def test_machines_come_and_go_by_a_trace_and_what_a_noticed_one_cannot_finish_is_handed_over_with_its_tokens(
    headrace_run: StartRun, small_model: Path, tmp_path: Path
) -> None:
    """Of three machines one goes with a notice and one without; the run is ended once the third has come.

    Answers take up to twelve seconds, the notice is of three: until half a second before its end they run there. The
    trace goes by the clock: on a busy machine a worker needs half a minute to start and to have something to do.
    """
    trace = tmp_path / "three.csv"
    trace.write_text(
        "at_s,node,event,kind\n0,a,up,spot\n0,b,up,spot\n"
        "32,a,notice,spot\n35,a,kill,spot\n36,b,kill,spot\n36,c,up,spot\n"
    )
    job = elastic_job(
        small_model,
        options={"base_s": 0.03, "mean_tokens": 150.0},
        rollout={"workers": 1, "max_running": 8, "max_tokens": 400},
        steps=100_000,
        sync={"mode": "async"},
        cluster={"place_rollout": "elastic", "prices": {"reserved": 10.0, "spot": 2.0}},
        provider={"kind": "local", "trace": str(trace)},
        limits={"hand_over_s": 0.5},
    )
    run = headrace_run(job)
    run.wait_for_event("samples_taken_back", worker="rollout-a")
    for node in "ab":
        run.wait_for_event("node_left", node=node)
    run.wait_for_event("node_joined", node="c")
    taken = run.events("samples_taken_back")
    last_step = max((row["step"] for row in run.rows()), default=-1)
    run.wait_for_step(last_step + 2)  # by then what was moved has ended elsewhere
    run.interrupt()
    summary = run.finish(state="interrupted", timeout_s=120)
    assert (summary["prompts_lost"], summary["samples_trained_twice"]) == (0, 0)

    noticed = next(row for row in run.events("worker_draining") if row["worker"] == "rollout-a")
    assert 0.5 < noticed["left_s"] <= 3.0, "its notice has reached the scheduler, with what is left of it"
    in_time = [row for row in taken if row["left_s"] <= 0.6]
    assert in_time and all(row["worker"] == "rollout-a" for row in taken)
    told = Told.by(read_history(run.run_dir))
    with_tokens = [name for name, tokens in told.moved.items() if tokens and told.left[name] == "rollout-a"]
    assert len(with_tokens) >= sum(row["samples"] for row in in_time) > 0

    assert summary["cost"] > 0
    assert summary["cost_per_step"] == pytest.approx(summary["cost"] / summary["steps"])
    rows = run.rows()
    assert sum(row["cost"] for row in rows) == pytest.approx(summary["cost"])
    assert all(row["cost"] > 0 for row in rows)
