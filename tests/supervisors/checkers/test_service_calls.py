"""What a training service must not have done is told, and what it may do is not."""

from __future__ import annotations

import dataclasses

import pytest

from configs.services import QueueConfig
from supervisors.checkers.service_calls import (
    BURSTS,
    CALLS,
    LIVES,
    SERVICE_PROMISES,
    START,
    TURNS,
    Computed,
    ServiceRecord,
    check_services,
)

QUEUE = QueueConfig(starvation_s=5.0, gap_s=1.0)
RIGHT = [("a", "accumulate 1"), ("a", "step 1"), ("a", "export_segment 1"), ("b", "accumulate 2"), ("b", "step 2")]


def call(
    job: str, what: str, began_s: float, *, asked_s: float | None = None, life: str = "1", took_s: float = 0.5
) -> Computed:
    asked = began_s if asked_s is None else asked_s
    return Computed(
        process="p", job=job, life=f"{job}{life}", what=what, asked_s=asked, began_s=began_s, ended_s=began_s + took_s
    )


def record(*calls: Computed, queue: QueueConfig = QUEUE) -> ServiceRecord:
    asked: dict[str, dict[int, list[str]]] = {}
    for one in calls:
        if one.what != START:
            numbered = asked.setdefault(one.life, {})
            numbered[len(numbered) + 1] = [one.what]
    return ServiceRecord(queues={"p": queue}, asked=asked, computed=list(calls))


def one_after_the_other() -> list[Computed]:
    return [call(job, what, 0.5 * place) for place, (job, what) in enumerate(RIGHT)]


def broken(seen: ServiceRecord) -> list[str]:
    return [violation.checker for violation in check_services(seen)]


def test_whole_bursts_of_two_jobs_are_in_order() -> None:
    assert broken(record(*one_after_the_other())) == []
    assert set(SERVICE_PROMISES) == {CALLS, LIVES, BURSTS, TURNS}


def test_a_call_that_is_computed_twice_is_told() -> None:
    calls = one_after_the_other()
    seen = record(*calls)
    seen.computed.append(call("b", "step 2", 2.5))
    assert broken(seen) == [CALLS]


def test_a_call_that_nobody_made_and_a_number_with_two_meanings_are_told() -> None:
    seen = record(*one_after_the_other())
    seen.asked["b1"][2] = ["step 3", "step 2"]
    assert broken(seen) == [CALLS, CALLS]


def test_an_older_life_that_computes_is_told_and_so_is_one_that_still_does() -> None:
    first, second = call("a", "save x", 0.0), call("a", START, 2.0, life="2")
    assert broken(record(first, second)) == []
    assert broken(record(first, second, call("a", "save y", 4.0))) == [LIVES]
    assert LIVES in broken(record(call("a", "save x", 0.0, took_s=3.0), second))


def test_two_calls_at_once_are_told() -> None:
    assert broken(record(call("a", "export_segment 1", 0.0), call("b", "step 2", 0.2))) == [BURSTS]


def test_a_call_within_another_jobs_burst_is_told_unless_its_gap_or_its_life_is_over() -> None:
    calls = [call("a", "accumulate 1", 0.0), call("b", "accumulate 2", 1.0)]
    assert broken(record(*calls)) == [BURSTS]
    assert broken(dataclasses.replace(record(*calls), over_s={"a1": 0.7})) == []
    assert broken(record(calls[0], call("b", "accumulate 2", 1.5))) == []


@pytest.mark.parametrize(("follows", "told"), [("export_segment 1", [BURSTS]), ("accumulate 3", []), ("score 3", [])])
def test_a_step_is_the_end_of_a_burst_only_where_it_is_not_published_as_in_a_replay(
    follows: str, told: list[str]
) -> None:
    calls = [call("a", "step 1", 0.0), call("b", "accumulate 2", 0.6), call("a", follows, 2.6)]
    assert broken(record(*calls)) == told
    asked_in_vain = record(*calls)
    asked_in_vain.computed.pop()
    assert broken(asked_in_vain) == told


@pytest.mark.parametrize(("follows", "told"), [("load x", [BURSTS]), ("export_segment 1", []), ("", [])])
def test_the_making_of_a_bundle_is_a_slice_of_its_own_unless_a_checkpoint_is_loaded(
    follows: str, told: list[str]
) -> None:
    calls = [call("a", START, 0.0), call("b", "export_segment 1", 0.6)]
    assert broken(record(*calls, *([call("a", follows, 1.6)] if follows else []))) == told


def test_who_has_waited_for_the_guard_is_not_passed_by_who_came_later() -> None:
    calls = [
        call("a", "export_segment 1", 6.0),
        call("a", "export_segment 2", 6.5, asked_s=6.0),
        call("b", "export_segment 1", 7.0, asked_s=1.0),
    ]
    assert broken(record(*calls)) == [TURNS]
    assert broken(record(*calls, queue=QUEUE.model_copy(update={"starvation_s": 6.0}))) == []
    assert broken(record(*calls, queue=QUEUE.model_copy(update={"policy": "round_robin"}))) == []


def test_who_waits_while_nothing_is_computed_is_told_unless_the_process_stood_still() -> None:
    seen = record(call("a", "export_segment 1", 0.0), call("b", "step 2", 2.0, asked_s=0.1))
    assert broken(seen) == [TURNS]
    assert broken(dataclasses.replace(seen, disturbed={"p"})) == []
