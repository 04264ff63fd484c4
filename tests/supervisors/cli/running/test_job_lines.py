"""The terminal of a head with several jobs: a line for what is new, with the job's name."""

from __future__ import annotations

from typing import Any

from supervisors.cli.running.job_lines import JobLines


def test_each_job_is_told_under_its_name_and_fast_steps_are_passed_over() -> None:
    said: list[str] = []
    now_s = 0.0
    lines = JobLines(said.append, lambda: now_s)

    def step(job: str, number: int) -> None:
        row: dict[str, Any] = {"of_job": job, "step": number, "reward_mean": number / 10, "seconds": 0.1}
        lines.update(row)

    lines.update({"of_job": "a", "state": "starting", "steps": 3, "message": "preparing the model"})
    lines.update({"of_job": "b", "phase": "making the model", "phase_done": 1, "phase_total": 9, "phase_unit": "steps"})
    for number in (1, 2):
        step("a", number)
    step("b", 1)
    step("a", 3)
    now_s = 1.5
    step("b", 2)
    lines.update({"of_job": "a", "state": "finished"})
    lines.update({"message": "the head ended; starting it again"})
    assert [line.partition("  reward")[0] for line in said] == [
        "a: preparing the model",
        "a: starting",
        "b: making the model: 1 of 9 steps",
        "a: step 0 (1 of 3)",
        "b: step 0",
        "a: step 2 (3 of 3)",  # the last one is always told
        "b: step 1",
        "a: finished",
        "the head ended; starting it again",
    ]
