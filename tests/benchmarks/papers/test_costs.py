"""Cost models against arithmetic on the data sheets."""

from __future__ import annotations

import numpy as np
import pytest

from actors.policies.assigning.generation_time import finish_times_s
from benchmarks.papers.cluster import costs
from benchmarks.papers.setups.hardware import DecodeCost, TrainCost
from benchmarks.papers.setups.streamrl import H20, H800, MODELS

SEVEN, LARGE = MODELS["7B"].transformer, MODELS["72B"].transformer


def test_a_step_at_batch_one_reads_the_weights_and_launches_the_layers() -> None:
    pace = costs.decode_pace(SEVEN, H800, DecodeCost())
    assert pace.step_s(1, 0) == pytest.approx(28 * 98e-6 + 15.2e9 / (0.8 * 3.35e12), rel=1e-3)


def test_context_costs_what_reading_its_keys_and_values_costs() -> None:
    pace = costs.decode_pace(SEVEN, H800, DecodeCost())
    more = pace.step_s(8, 10_000) - pace.step_s(8, 0)
    assert more == pytest.approx(8 * 10_000 * (2 * 28 * 4 * 128 * 2) / (0.8 * 3.35e12))


def test_products_hide_behind_the_weights_until_the_batch_is_large() -> None:
    pace = costs.decode_pace(SEVEN, H800, DecodeCost())
    small = pace.step_s(65, 0) - pace.step_s(64, 0)
    large = pace.step_s(513, 0) - pace.step_s(512, 0)
    assert large > 1.5 * small


def test_the_kv_cache_gets_what_the_weights_leave() -> None:
    instance = costs.rollout_instance(SEVEN, H800, DecodeCost(), places=256, reserve_tokens=20_000)
    assert instance.kv_tokens == pytest.approx((0.9 * 80e9 - 15.2e9) / 57_344)
    too_small = LARGE.model_copy(update={"tensor_parallel": 1})
    with pytest.raises(ValueError, match=r"72B on 1 H800: weights of 145 GB do not fit"):
        costs.rollout_instance(too_small, H800, DecodeCost(), places=1, reserve_tokens=1)


def test_reserving_the_longest_response_keeps_samples_waiting_that_would_fit() -> None:
    held = costs.rollout_instance(LARGE, H800, DecodeCost(), places=256, reserve_tokens=20_000)
    free = costs.rollout_instance(LARGE, H800, DecodeCost(), places=256, reserve_tokens=0)
    lengths = [1000] * 60
    assert finish_times_s(held, [400] * 60, lengths).max() > 2 * finish_times_s(free, [400] * 60, lengths).max()


def test_training_takes_flops_over_rate_and_halves_on_twice_the_devices() -> None:
    cost = TrainCost(flops_use=0.5)
    tokens = np.array([1000, 2000])
    seconds = costs.train_token_s(SEVEN, H800, cost, 8, tokens)
    by_hand = 18 * (7.6e9 * 1000 + 28 * 3584 * 1000**2) / (8 * 989.5e12 * 0.5)
    assert seconds[0] == pytest.approx(by_hand)
    assert seconds[1] > 2 * seconds[0]
    assert costs.train_token_s(SEVEN, H800, cost, 16, tokens).sum() == pytest.approx(seconds.sum() / 2)


def test_instances_of_one_machine_share_its_link_and_a_wide_area_line_is_crossed_once() -> None:
    one_each = costs.transfer_s(LARGE, H800, 8)  # two instances of four devices
    assert one_each == pytest.approx(2 * 145.4e9 / 200e9)
    assert costs.transfer_s(LARGE, H800, 64) == pytest.approx(one_each)  # trees reach the machines side by side
    across = costs.transfer_s(SEVEN, H20, 32, wide_area_bytes_s=10e9)
    assert across == pytest.approx(8 * 15.2e9 / 12.5e9 + 15.2e9 / 10e9)
