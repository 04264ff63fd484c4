"""Real runs whose trainer's machine generates in a seeding window: with a machine beside it, and all alone."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from small_job import TORCH, TORCH_TRAINER, simulated_rollout

from supervisors.testing.run_under_test import HeadraceRun

Bars = list[tuple[float, float]]


def bars(run: HeadraceRun, track: str, name: str) -> Bars:
    """When that process did so, in microseconds, by the run's trace."""
    rows: list[dict[str, Any]] = json.loads((run.run_dir / "trace.json").read_text())
    number = next(row["tid"] for row in rows if row["ph"] == "M" and row["args"].get("name") == track)
    found = [row for row in rows if row["ph"] == "X" and row["tid"] == number and row["name"] == name]
    return [(row["ts"], row["ts"] + row["dur"]) for row in found]


def overlap_s(some: Bars, others: Bars) -> float:
    return sum(max(0.0, min(b, d) - max(a, c)) for a, b in some for c, d in others) / 1e6


def finish(run: HeadraceRun) -> None:
    summary = run.finish(timeout_s=300)
    assert (summary["prompts_lost"], summary["samples_trained_twice"]) == (0, 0)


def beside_a_machine(start_run: Callable[..., HeadraceRun], model: Path, trace: Path, **sections: Any) -> HeadraceRun:
    """A run of 12 steps beside one machine that comes at once; ``sections`` go on top of it.

    Simulated engines of 30 ms a step: answers of 40 tokens take 1.2 s, the first window is a third of that.
    """
    trace.write_text("at_s,node,event,kind\n0,a,up,spot\n")
    rollout = simulated_rollout(model, workers=1, max_tokens=40)
    job: dict[str, Any] = {
        "rollout": rollout | {"engine_options": rollout["engine_options"] | {"mean_tokens": 40}},
        "scheduling": {"seeding": True, "seeding_first_s": 0.4, "seeding_floor_s": 0.3},
        **TORCH_TRAINER,
        "sync": {"mode": "dynamic"},
        "cluster": {"place_rollout": "elastic"},
        "provider": {"kind": "local", "trace": str(trace)},
    }
    return start_run("beside", steps=12, **job | sections)


@pytest.mark.timeout(500)
def test_another_machine_takes_over_when_the_window_ends_and_the_trainers_workers_sleep(
    start_run: Callable[..., HeadraceRun], small_model: Path, tmp_path: Path
) -> None:
    run = beside_a_machine(start_run, small_model, tmp_path / "one.csv")
    finish(run)
    handed_over = [row for row in run.events("seeding_window") if row["why"] == "time" and row["handed_over"]]
    assert handed_over, "the other machine was there for some of the steps"
    assert not run.events("engine_stays_awake")
    assert sum(b - a for a, b in bars(run, "rollout-a", "generate")) > 0
    asleep, training = bars(run, "rollout-0", "asleep"), bars(run, "trainer", "train")
    awake = bars(run, "rollout-0", "generate")
    assert asleep
    assert overlap_s(awake, training) < 0.05 * overlap_s(asleep, training), "spans are of two clocks' roundings"
    rows = run.rows()
    assert all(row["seed_s"] > 0 and row["seeding_target"] >= 1 for row in rows)


@pytest.mark.long
@pytest.mark.timeout(500)
def test_with_overlapping_steps_another_machine_comes_and_is_lost_and_the_trainers_goes_on_alone(
    start_run: Callable[..., HeadraceRun], small_model: Path, tmp_path: Path
) -> None:
    """As above, one step of staleness; long answers are few, so the next step's begin beside them."""
    trace = tmp_path / "lost.csv"
    trace.write_text("at_s,node,event,kind\n0,a,up,spot\n14,a,kill,spot\n")
    rollout = simulated_rollout(small_model, workers=1, max_tokens=80)
    run = start_run(
        "overlapping",
        steps=20,
        rollout=rollout
        | {"engine_options": rollout["engine_options"] | {"mean_tokens": 25}, "length_ranking": "siblings"},
        scheduling={"seeding": True, "seeding_first_s": 0.4, "seeding_floor_s": 0.3},
        **TORCH_TRAINER,
        sync={"mode": "async", "max_staleness": 1},
        cluster={"place_rollout": "elastic"},
        provider={"kind": "local", "trace": str(trace)},
    )
    finish(run)
    seen = run.events("seeding_window")
    assert [row for row in seen if row["why"] == "time" and row["handed_over"]], "while the other machine was there"
    assert len(run.events("node_left")) == 1
    alone = [row for row in seen if row["remote"] == 0]
    assert seen[-1] in alone
    assert {row["why"] for row in alone} == {"generated"}
    assert sum(row["handed_over"] for row in alone) > 0, "what had begun of the next step"
    assert not run.events("engine_stays_awake")
    assert max(row["staleness_max"] for row in run.rows()) == 1
    asleep, training = bars(run, "rollout-0", "asleep"), bars(run, "trainer", "train")
    assert overlap_s(bars(run, "rollout-0", "generate"), training) < 0.05 * overlap_s(asleep, training)


@pytest.mark.long
@pytest.mark.timeout(500)
@pytest.mark.parametrize(("spot", "kept"), [(100.0, 0), (0.01, 1)], ids=["dear", "cheap"])
def test_with_prices_another_machine_is_kept_only_while_it_makes_a_step_cheaper(
    start_run: Callable[..., HeadraceRun], small_model: Path, tmp_path: Path, spot: float, kept: int
) -> None:
    prices = {"place_rollout": "elastic", "prices": {"reserved": 10.0, "spot": spot}}
    run = beside_a_machine(start_run, small_model, tmp_path / "one.csv", cluster=prices)
    finish(run)
    aimed = [row["remote_workers"] for row in run.events("capacity_target")]
    assert aimed, "a machine was there for three steps"
    assert all(aim >= 1 for aim in aimed) if kept else set(aimed) == {0}
    windows = run.events("seeding_window")
    assert windows[-1]["remote"] == kept
    ended_early = [row["why"] != "generated" for row in windows]  # on a busy machine it may be late for one
    assert any(ended_early) if kept else not ended_early[-1]


@pytest.mark.long
@pytest.mark.timeout(500)
def test_without_another_machine_torch_engines_and_trainer_take_turns(
    start_run: Callable[..., HeadraceRun],
) -> None:
    """A real engine, which frees its cache and wakes with the next version. One worker: it is there for every step."""
    torch = TORCH | {"rollout": TORCH["rollout"] | {"workers": 1}}
    run = start_run("alone", **torch, steps=8, scheduling={"seeding": True}, cluster={"place_rollout": "local"})
    finish(run)
    windows = run.events("seeding_window")
    assert [(row["step"], row["why"]) for row in windows] == [(step, "generated") for step in range(8)]
    assert not run.events("engine_stays_awake")
    generating, training = bars(run, "rollout-0", "generate"), bars(run, "trainer", "train")
    assert bars(run, "rollout-0", "asleep")
    assert overlap_s(generating, training) < 0.05 * sum(b - a for a, b in training) / 1e6
