"""What machines cost: from their coming to their going, by kind."""

from __future__ import annotations

import pytest

from supervisors.jobs.cost_meter import CostMeter


class Clock:
    now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def test_each_machine_costs_its_kinds_price_for_the_time_that_it_is_there() -> None:
    clock = Clock()
    meter = CostMeter({"reserved": 36.0, "spot": 3.6}, clock)
    assert meter.see(["reserved"]) == []
    clock.now_s += 100
    assert meter.spent() == pytest.approx(1.0)
    meter.see(["reserved", "spot", "spot"])
    clock.now_s += 100
    assert meter.spent() == pytest.approx(1.0 + 1.0 + 0.2)
    meter.see([])
    clock.now_s += 1000
    assert meter.spent() == pytest.approx(2.2)


def test_a_kind_without_a_price_costs_nothing_and_is_told_when_it_comes() -> None:
    clock = Clock()
    meter = CostMeter({"reserved": 36.0}, clock)
    assert meter.see(["reserved", "h20", "h20"]) == ["h20"]
    assert meter.see(["reserved", "h20"]) == []
    clock.now_s += 100
    assert meter.spent() == pytest.approx(1.0)


def test_what_is_taken_is_taken_once_whoever_comes_and_goes_in_between() -> None:
    clock = Clock()
    meter = CostMeter({"reserved": 36.0}, clock)
    meter.see(["reserved"])
    clock.now_s += 100
    assert meter.take() == pytest.approx(1.0)
    assert meter.take() == 0.0
    clock.now_s += 100
    meter.see(["reserved", "reserved"])
    clock.now_s += 100
    assert meter.take() == pytest.approx(1.0 + 2.0)
    assert meter.spent() == pytest.approx(4.0)
