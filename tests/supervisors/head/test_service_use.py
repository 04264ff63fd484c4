"""What a service has cost and saved, by hand."""

from __future__ import annotations

from supervisors.head.service_use import ServiceUse


def test_the_saving_is_the_time_of_one_process_against_that_of_a_trainer_each_less_what_jobs_waited() -> None:
    use = ServiceUse()
    assert (use.saving(0.0), use.bubble(0.0)) == (None, None)
    use.joined("a", 0.0)
    use.joined("b", 20.0)
    for _ in range(4):
        use.step("a", waited_s=2.0, switch_s=0.5, compute_s=5.0)
        use.step("b", waited_s=0.0, switch_s=0.0, compute_s=10.0)
    assert use.held_s(100.0) == 100.0
    assert use.alone_s(100.0) == (100 - 10) + 80
    assert use.saving(100.0) == 1 - 100 / 170
    assert use.bubble(100.0) == 1 - 60 / 100


def test_jobs_that_have_left_count_on_and_a_service_that_serves_nobody_costs_nothing() -> None:
    use = ServiceUse()
    use.joined("a", 0.0)
    use.step("a", waited_s=0.0, switch_s=0.0, compute_s=1.0)
    use.left("a", 10.0)
    use.left("a", 11.0)
    use.step("a", waited_s=9.0, switch_s=0.0, compute_s=9.0)
    assert (use.held_s(50.0), use.alone_s(50.0), use.compute_s, use.steps, list(use.jobs)) == (10.0, 10.0, 1.0, 1, [])
    use.joined("b", 50.0)
    assert use.held_s(60.0) == 20.0
