"""What a service has cost and saved, by hand."""

from __future__ import annotations

from supervisors.sharing.service_use import ServiceUse


def step(use: ServiceUse, job: str, now_s: float, *, waited_s: float = 0.0, compute_s: float = 5.0) -> None:
    use.step(job, now_s, 10.0, waited_s=waited_s, switch_s=0.5, compute_s=compute_s)


def test_the_saving_is_the_time_of_one_process_against_that_of_a_trainer_each_less_what_jobs_waited() -> None:
    use = ServiceUse()
    use.joined("a")
    use.joined("b")
    assert (use.saving(5.0), use.bubble(5.0), use.held_s(5.0)) == (None, None, 0.0)
    for now_s in (110.0, 120.0, 130.0, 140.0):
        step(use, "a", now_s, waited_s=2.0)
        step(use, "b", now_s + 20.0, compute_s=10.0)
    assert use.held_s(200.0) == 100.0
    assert use.alone_s(200.0) == (100 - 10) + (80 - 2)
    assert use.saving(200.0) == 1 - 100 / 168
    assert use.bubble(200.0) == 1 - 60 / 100
    assert use.sentence("train-0", 200.0) == (
        "service train-0: 8 steps of a, b in 100.0 s of one trainer; "
        "alone, theirs would have been kept for 168.0 s (40% saved)"
    )


def test_jobs_that_have_left_count_on_and_a_service_that_serves_nobody_costs_nothing() -> None:
    use = ServiceUse()
    use.joined("a")
    step(use, "a", 10.0)
    use.left("a", 10.0)
    use.left("a", 11.0)
    step(use, "a", 12.0)
    assert (use.held_s(50.0), use.alone_s(50.0), use.compute_s, use.steps, list(use.jobs)) == (10.0, 9.5, 5.0, 1, [])
    use.joined("b")
    assert use.held_s(60.0) == 10.0, "its processes are being started"
    step(use, "b", 70.0)
    assert use.held_s(70.0) == 20.0
    assert use.served == ["a", "b"]


def test_a_job_is_slowed_down_by_what_it_waits_and_the_service_shows_the_one_that_loses_most() -> None:
    use = ServiceUse()
    use.joined("a")
    use.joined("b")
    assert (use.slowdown(), use.jobs["a"].slowdown) == (None, None)
    step(use, "a", 10.0, waited_s=2.0)  # 7.5 of 10 s are its own
    step(use, "a", 20.0)  # 9.5 of them
    step(use, "b", 20.0)
    assert use.jobs["a"].slowdown == 20.0 / 17.0
    assert use.slowdown() == use.jobs["a"].slowdown
    use.left("a", 20.0)
    assert use.slowdown() == 10.0 / 9.5


def test_a_step_counts_as_no_shorter_alone_than_what_was_computed_for_it() -> None:
    use = ServiceUse()
    use.joined("a")
    step(use, "a", 10.0, waited_s=9.0, compute_s=4.0)
    assert use.jobs["a"].slowdown == 10.0 / 4.0
