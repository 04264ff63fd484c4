"""A plan strikes when it should, in virtual time, says what it could not do, and goes on with the next head."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from configs.errors import ConfigError
from configs.fault_plan import FaultBase, FaultPlan
from supervisors.nemesis.fault_schedule import FaultSchedule, JobFaults, check_plan, faults_of
from supervisors.tree.errors import FaultNotPossible
from tests.actors.scheduler_world import config
from tests.simulated import run_simulated


class Run:
    """A run that commits a step every second, and writes the events of its nemesis as a real one does."""

    def __init__(self, run_dir: Path) -> None:
        self.run_dir = run_dir
        self.said: list[str] = []
        self.strikes: list[tuple[float, int, str]] = []
        self.impossible: set[str] = set()
        self.never: set[str] = set()
        """Kinds whose target does not come."""
        self.listeners: list[Callable[[Mapping[str, Any]], None]] = []
        self.steps = 0

    def summary(self) -> dict[str, Any]:
        return {"steps": self.steps}

    def subscribe(self, listener: Callable[[Mapping[str, Any]], None]) -> Callable[[], None]:
        self.listeners.append(listener)
        return lambda: self.listeners.remove(listener)

    def say(self, message: str) -> None:
        self.said.append(message)

    def record(self, name: str, **fields: Any) -> None:
        with (self.run_dir / "events.jsonl").open("a") as file:
            file.write(json.dumps({"time_s": asyncio.get_running_loop().time(), "event": name, **fields}) + "\n")

    def events(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in (self.run_dir / "events.jsonl").read_text().splitlines()]

    async def strike(self, fault: FaultBase, rng: random.Random, number: int = 0) -> list[str]:
        self.strikes.append((asyncio.get_running_loop().time(), number, fault.kind))
        if fault.target.role == "head":
            self.record("fault_announced", fault=number)
            raise asyncio.CancelledError  # nobody lives to tell
        if fault.kind in self.never:
            await asyncio.get_running_loop().create_future()
        if fault.kind in self.impossible:
            self.record("fault_failed", fault=number)
            raise FaultNotPossible("not here")
        self.record("fault_injected", fault=number)
        return [str(rng.random())]

    async def go_on(self, seconds: int) -> None:
        for _ in range(seconds):
            await asyncio.sleep(1)
            self.steps += 1
            for listener in list(self.listeners):
                listener({"step": self.steps, "reward_mean": 0.5})
                listener({"message": "of no interest", "step": 99})


def plan_of(*faults: dict[str, Any], seed: int = 0) -> FaultPlan:
    return FaultPlan.model_validate({"seed": seed, "faults": list(faults)})


def plan(*faults: dict[str, Any], seed: int = 0) -> JobFaults:
    """All of a plan's faults, as the only job has them."""
    return faults_of(plan_of(*faults, seed=seed), "j", ["j"])


def play(tmp_path: Path, scenario: Callable[[Run], Awaitable[None]]) -> Run:
    run = Run(tmp_path)
    run_simulated(scenario(run))  # type: ignore[arg-type]
    return run


ROLLOUT = {"role": "rollout"}


def test_each_fault_strikes_at_its_time_or_after_its_step(tmp_path: Path) -> None:
    told: dict[str, int] = {}

    async def scenario(run: Run) -> None:
        schedule = FaultSchedule(
            run,
            run,
            plan(
                {"kind": "kill", "target": ROLLOUT, "at_s": 2.5},
                {"kind": "hang", "target": ROLLOUT, "after_step": 4},
                {"kind": "slow", "target": ROLLOUT, "after_step": 4, "at_s": 0.5},
                {"kind": "clock", "target": ROLLOUT},
                {"kind": "kill", "target": ROLLOUT, "at_s": 1, "times": 3, "every_s": 2},
                {"kind": "preempt", "target": ROLLOUT, "after_step": 90},
            ),
        )
        schedule.start()
        await run.go_on(8)
        told.update(schedule.stop())

    run = play(tmp_path, scenario)
    assert run.strikes == [
        (0.0, 3, "clock"), (1.0, 4, "kill"), (2.5, 0, "kill"), (3.0, 4, "kill"), (4.0, 1, "hang"), (4.5, 2, "slow"),
        (5.0, 4, "kill"),
    ]  # fmt: skip
    assert told == {"injected": 7, "failed": 0, "skipped": 1}
    assert run.listeners == []
    assert [(row["kind"], row["strikes"]) for row in run.events() if row["event"] == "fault_skipped"] == [
        ("preempt", 1)
    ]


def test_what_cannot_be_done_is_told_and_the_rest_goes_on(tmp_path: Path) -> None:
    told: dict[str, int] = {}

    async def scenario(run: Run) -> None:
        run.impossible = {"hang"}
        schedule = FaultSchedule(
            run, run, plan({"kind": "hang", "target": ROLLOUT}, {"kind": "kill", "target": ROLLOUT})
        )
        schedule.start()
        await run.go_on(1)
        told.update(schedule.stop())

    run = play(tmp_path, scenario)
    assert told == {"injected": 1, "failed": 1, "skipped": 0}
    assert "fault 0 (hang on role rollout) was not injected: not here" in run.said


def test_a_strike_that_still_waits_for_its_target_when_the_run_is_over_is_skipped(tmp_path: Path) -> None:
    told: dict[str, int] = {}

    async def scenario(run: Run) -> None:
        run.never = {"hang"}
        schedule = FaultSchedule(
            run, run, plan({"kind": "hang", "target": ROLLOUT}, {"kind": "kill", "target": ROLLOUT})
        )
        schedule.start()
        await run.go_on(1)
        told.update(schedule.stop())

    play(tmp_path, scenario)
    assert told == {"injected": 1, "failed": 0, "skipped": 1}


def test_equal_seeds_draw_alike_and_a_fault_draws_apart_from_its_neighbours(tmp_path: Path) -> None:
    drawn: list[list[str]] = []

    def scenario(seed: int, *faults: dict[str, Any]) -> Callable[[Run], Awaitable[None]]:
        async def go(run: Run) -> None:
            schedule = FaultSchedule(run, run, plan(*faults, seed=seed))
            schedule.start()
            await run.go_on(3)
            schedule.stop()
            drawn.append([message.partition(" on ")[2] for message in run.said])

        return go

    twice = {"kind": "kill", "target": ROLLOUT, "times": 2, "every_s": 1}
    for seed, faults in ((1, (twice, twice)), (1, (twice, twice)), (2, (twice, twice))):
        play(tmp_path, scenario(seed, *faults))
    assert drawn[0] == drawn[1] != drawn[2]
    assert len(set(drawn[0])) == 4


def test_the_next_head_goes_on_where_the_killed_one_had_come_to(tmp_path: Path) -> None:
    """Not once more the strike that killed it, and times go on from when the plan began."""
    faults = plan(
        {"kind": "kill", "target": {"role": "head"}, "after_step": 2},
        {"kind": "kill", "target": ROLLOUT, "at_s": 5},
        {"kind": "hang", "target": ROLLOUT, "at_s": 1, "times": 3, "every_s": 2},
    )
    told: dict[str, int] = {}

    async def scenario(run: Run) -> None:
        first = FaultSchedule(run, run, faults)
        first.start()
        await run.go_on(2)
        await asyncio.sleep(0.5)
        first._unsubscribe()
        for task in first._tasks:
            task.cancel()
        with (run.run_dir / "events.jsonl").open("a") as file:
            file.write('{"time_s": 2.5, "event": "fault_inj\n')
        second = FaultSchedule(run, run, faults, continued=True)
        second.start()
        await run.go_on(5)
        told.update(second.stop())

    run = play(tmp_path, scenario)
    assert [(n, kind) for _, n, kind in run.strikes] == [
        (2, "hang"),
        (0, "kill"),
        (2, "hang"),
        (1, "kill"),
        (2, "hang"),
    ]
    assert [at for at, n, _ in run.strikes if n == 1] == [pytest.approx(5.0, abs=1e-3)]
    assert told == {"injected": 5, "failed": 0, "skipped": 0}
    assert sum(row.get("event") == "faults_started" for row in _readable(run)) == 1


def test_a_plan_of_a_resumed_run_begins_anew(tmp_path: Path) -> None:
    async def scenario(run: Run) -> None:
        for _ in range(2):
            schedule = FaultSchedule(run, run, plan({"kind": "kill", "target": ROLLOUT}))
            schedule.start()
            await run.go_on(1)
            assert schedule.stop() == {"injected": 1, "failed": 0, "skipped": 0}

    assert len(play(tmp_path, scenario).strikes) == 2


def _readable(run: Run) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    for line in (run.run_dir / "events.jsonl").read_text().splitlines():
        try:
            rows.append(json.loads(line))
        except ValueError:
            continue
    return rows


@pytest.mark.parametrize(
    ("fault", "says"),
    [
        ({"kind": "kill", "target": {"name": "trainr"}}, "faults.0.target.name: no process of this run is called"),
        ({"kind": "kill", "target": {"role": "rollout", "job": "k"}}, "faults.0.target.job: this run is of job 'j'"),
        ({"kind": "kill", "target": ROLLOUT, "after_step": 5}, "faults.0.after_step: 5 is more than the job's 4 steps"),
    ],
)
def test_a_plan_that_does_not_fit_its_job_is_refused_before_the_run(fault: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError) as caught:
        check_plan(plan_of(fault), [config()], "plan.yaml")
    assert says in str(caught.value)


def test_faults_of_a_plan_for_several_jobs_are_those_of_the_job_that_they_name() -> None:
    several = plan_of(
        {"kind": "kill", "target": ROLLOUT | {"job": "b"}},
        {"kind": "kill", "target": {"role": "head"}},
        {"kind": "kill", "target": {"node": "spot-1", "job": "b"}},
        {"kind": "preempt", "target": {"role": "node"}},
    )
    assert [sorted(faults_of(several, job, ["a", "b"]).numbers) for job in ("a", "b")] == [[1, 3], [0, 2]]


@pytest.mark.parametrize(
    ("fault", "says"),
    [
        ({"kind": "kill", "target": ROLLOUT}, "is missing, and role rollout may be of any of the jobs 'a', 'b'"),
        ({"kind": "drop", "target": {"link": ["head", "trainer"]}}, "may be of any of the jobs 'a', 'b'"),
        ({"kind": "kill", "target": {"role": "head"}, "after_step": 1}, "after_step may count the steps of any"),
        ({"kind": "kill", "target": ROLLOUT | {"job": "c"}}, "this run is of jobs 'a', 'b', not 'c'"),
    ],
)
def test_a_target_that_several_jobs_have_is_refused_unless_it_names_one(fault: dict[str, Any], says: str) -> None:
    jobs = [config().model_copy(update={"name": name}) for name in ("a", "b")]
    with pytest.raises(ConfigError, match=says):
        check_plan(plan_of(fault), jobs, "plan.yaml")
    named = fault | {"target": fault["target"] | {"job": "b"}}
    check_plan(plan_of(named), jobs, "plan.yaml")
