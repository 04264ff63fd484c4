"""From rows, spans and events to what the page shows."""

from __future__ import annotations

from typing import Any

import pytest

from supervisors.cli.console.page_data import (
    COLUMNS,
    Activity,
    Workers,
    lanes,
    more_columns,
    progress,
    rates,
    sample_card,
    step_values,
    told,
)
from tests.supervisors.cli.console.recorded_run import event, events, row, sample


def nothing_known(worker: str, second: float) -> None:
    return None


def test_a_row_becomes_its_columns_with_rates_and_without_what_is_no_number() -> None:
    values = dict(zip(COLUMNS, step_values(row(3, reward_mean=None, loss=float("nan"))), strict=True))
    assert values["tokens_per_s"] == 3200 and values["samples_per_s"] == 32
    assert values["reward_mean"] is None and values["loss"] is None and values["cost"] is None
    assert step_values({"step": 1, "seconds": 0})[COLUMNS.index("tokens_per_s")] is None


def test_the_rest_of_the_run_takes_what_its_last_steps_took() -> None:
    slow_then_fast = [step_values(row(step, seconds=60.0 if step < 10 else 2.0)) for step in range(40)]
    found = progress(slow_then_fast, 100)
    assert (found["step"], found["eta_s"], found["policy_version"]) == (40, 120.0, 40)
    assert progress([], 100)["eta_s"] is None and progress(slow_then_fast, None)["eta_s"] is None


def test_lanes_show_the_last_steps_with_the_step_and_version_of_each_bar() -> None:
    spans = [
        *[Activity("trainer", "wait", 10.0 * s, 10.0 * s + 4, {"step": s, "missing": 3}) for s in range(5)],
        *[Activity("trainer", "train", 10.0 * s + 4, 10.0 * s + 9, {"step": s}) for s in range(5)],
        *[
            Activity("rollout-10", "generate", 10.0 * s + 1, 10.0 * s + 2, {"version": s, "tokens": 5})
            for s in range(5)
        ],
        Activity("rollout-2", "generate", 31.0, 33.0, {}),
        Activity("rollout-2", "idle", 33.0, 49.0, {}),
    ]
    data = lanes(spans, lambda worker, second: 7 if worker == "rollout-2" else None, steps=2, bars=100)
    assert data["origin_s"] == 30.0 and data["steps"] == [[3, 0.0], [4, 10.0]] and data["end_s"] == 19.0
    shown = {lane["name"]: lane for lane in data["lanes"]}
    assert list(shown) == ["trainer", "rollout-2", "rollout-10"]
    assert shown["trainer"]["bars"][0] == ["wait", 0.0, 4.0, 3, None, 3]
    assert shown["rollout-2"]["bars"] == [["generate", 1.0, 3.0, 3, 7, None], ["idle", 3.0, 19.0, 3, 7, None]]
    assert shown["rollout-2"]["busy"] == pytest.approx(2 / 18, rel=1e-3) and shown["rollout-2"]["bubbles"] == 1
    assert [bar[4] for bar in shown["rollout-10"]["bars"]] == [3, 4]
    assert shown["rollout-10"]["gaps"] == [[2.0, 11.0]], "it was not there meanwhile"


def test_a_bar_that_was_cut_in_two_is_one_and_only_the_newest_are_kept() -> None:
    cut = [Activity("rollout-0", "generate", float(i), float(i + 1), {"version": 1}) for i in range(5)]
    assert len(lanes(cut, nothing_known, 3, 100)["lanes"][0]["bars"]) == 1
    apart = [Activity("rollout-0", "generate", 2.0 * i, 2.0 * i + 1, {}) for i in range(50)]
    data = lanes(apart, nothing_known, 3, 10)
    assert len(data["lanes"][0]["bars"]) == 10 and data["origin_s"] == 80.0
    assert lanes([], nothing_known, 3, 10)["lanes"] == []


def test_a_worker_that_sleeps_is_not_busy() -> None:
    spans = [Activity("rollout-0", "generate", 0.0, 1.0, {}), Activity("rollout-0", "asleep", 1.0, 4.0, {})]
    assert lanes(spans, nothing_known, 3, 10)["lanes"][0]["busy"] == pytest.approx(0.25)


def test_tokens_a_second_are_of_the_last_seconds() -> None:
    made = {"tokens": 100, "running": 3, "queued": 9}
    spans = [Activity("rollout-0", "generate", float(i), i + 1.0, made) for i in range(30)]
    assert rates(spans) == {"rollout-0": {"tokens_per_s": pytest.approx(100), "running": 3, "queued": 9}}
    assert rates([Activity("rollout-0", "idle", 0.0, 1.0, {})]) == {}


def test_workers_are_followed_through_loss_and_return() -> None:
    workers = Workers(100)
    for item in events():
        if item["time_s"] < event(9.15, "")["time_s"]:
            workers.hear(item)
    lost = workers.table([])[1]
    assert (lost["name"], lost["state"], lost["why"]) == ("rollout-1", "lost", "signal 9")
    for item in events():
        if item["time_s"] > event(9.15, "")["time_s"]:
            workers.hear(item)
    first, second = workers.table(
        [Activity("rollout-1", "generate", 0.0, 10.0, {"tokens": 50, "running": 2, "queued": 1})]
    )
    assert (first["state"], first["restarts"], second["state"], second["restarts"]) == ("running", 0, "running", 1)
    assert second["tokens_per_s"] == pytest.approx(5) and (second["running"], second["queued"]) == (2, 1)
    assert workers.version_at("rollout-0", event(4.5, "")["time_s"]) == 2
    assert workers.version_at("rollout-0", 0.0) is None and workers.version_at("nobody", 1e12) is None


def test_what_the_running_system_says_of_a_worker_counts_more() -> None:
    workers = Workers(100)
    workers.hear(event(0.0, "worker_registered", worker="rollout-0", node="head", slots=4))
    tree = [
        {"name": "rollout-0", "role": "rollout", "state": "starting", "pid": 12, "node": "n1", "restarts": 4},
        {"name": "rollout-1", "role": "rollout", "state": "pending", "pid": 0, "node": "n1", "restarts": 0},
        {"name": "trainer", "role": "trainer", "state": "running", "pid": 13, "node": "head", "restarts": 0},
    ]
    rows = workers.table([], tree)
    assert [(row["name"], row["state"], row["restarts"]) for row in rows] == [
        ("rollout-0", "starting", 4),
        ("rollout-1", "pending", 0),
    ]


@pytest.mark.parametrize(
    ("item", "level", "words"),
    [
        (event(0, "job_state", state="failed", reason="no room"), "bad", "the job is failed: no room"),
        (event(0, "trouble", kind="k", message="all answers cut", count=2), "bad", "all answers cut"),
        (event(0, "child_exited", child="trainer", cause="crashed", detail="exit code 70"), "warn", "exit code 70"),
        (event(0, "checkpoint_stored", step=20, path="p"), "note", "checkpoint stored: step 20, path p"),
        (event(0, "something_new", worker="w", after_s=0.123456789), "warn", "something new w: after 0.123457 s"),
    ],
)
def test_events_are_told_by_how_much_they_need_somebody(item: dict[str, Any], level: str, words: str) -> None:
    entry = told(item)
    assert entry is not None and entry.level == level and words in entry.text


def test_the_ordinary_course_of_each_step_is_not_told() -> None:
    assert told(event(0, "worker_version", worker="w", version=1)) is None
    assert told(event(0, "child_exited", child="trainer", cause="completed", detail="")) is None
    assert told(event(0, "worker_down", worker="w", reason="stopped", detail="")) is None


def test_a_long_text_loses_its_middle_and_the_card_says_how_much() -> None:
    card = sample_card(sample(1, response="x" * 60, prompt_text="y" * 60), 20)
    cut = f"{'x' * 15} … 40 characters left out … {'x' * 5}"
    assert card["turns"] == [{"role": "model", "title": "response", "text": cut}] and card["reward"] == 0.5
    assert card["prompt_text"] == cut.replace("x", "y")


def test_the_turns_of_an_episode_are_titled_and_share_the_room_of_one_text() -> None:
    said = [("model", "x" * 99), ("tool", "y" * 4), ("model", "z" * 99)]
    turns = [
        {"role": role, "text": text, "tokens": 9, "name": "py" * (role == "tool"), "fresh": False}
        for role, text in said
    ]
    card = sample_card(sample(1, turns=turns), 40)
    assert [turn["title"] for turn in card["turns"]] == [
        "turn 1, model, 9 tokens", "turn 2, tool py, 9 tokens", "turn 3, model, 9 tokens",
    ]  # fmt: skip
    assert [turn["text"].count(turn["text"][0]) for turn in card["turns"]] == [18, 4, 18]


def test_the_end_of_a_job_and_what_each_job_does_are_no_alarms() -> None:
    down = {"event": "worker_down", "worker": "rollout-0", "reason": "exited", "detail": "signal 15"}
    assert told(down) is not None and told(down, over=True) is None, "a job's processes end with it"
    for name in ("environment_registered", "evaluation_began", "evaluation_ended", "worker_draining"):
        entry = told({"event": name, "worker": "w"})
        assert entry is not None and entry.level == "note", name


def test_a_worker_that_ends_with_its_job_is_not_lost() -> None:
    workers = Workers(8)
    workers.hear({"event": "worker_registered", "worker": "rollout-0", "node": "head"})
    workers.hear({"event": "worker_down", "worker": "rollout-0", "reason": "exited"}, over=True)
    assert [row["state"] for row in workers.table([])] == ["ended"]


def test_columns_that_only_some_jobs_have_come_behind_the_usual_ones() -> None:
    rows = [{"step": 0, "own": 1.5, "text": "x", "none": None}, {"step": 1, "reward_form_mean": 0.5}]
    more = more_columns(rows, COLUMNS)
    assert more == ["own", "reward_form_mean"]
    assert step_values(rows[0], [*COLUMNS, *more])[-2:] == [1.5, None]
