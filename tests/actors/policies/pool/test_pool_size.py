"""The number of rollout workers follows the measured gap, slowly, within its bounds, and without swinging."""

from __future__ import annotations

import itertools
import math
import random

from hypothesis import given
from hypothesis import strategies as st

from actors.policies.pool.pool_size import PoolRules, PoolSize, StageReport, decide

RULES = PoolRules(least=1, most=8)


def step(
    work_s: float, train_s: float, workers: int, *, tail_s: float = 0.0, price_share: float | None = None
) -> StageReport:
    """``work_s`` of generation is shared by the workers, but for a tail."""
    return StageReport(max(work_s / workers, tail_s), train_s, workers, price_share)


def settle(work_s: float, train_s: float, workers: int, rules: PoolRules = RULES, *, steps: int = 60) -> list[int]:
    sizes, size = [workers], PoolSize(workers)
    for _ in range(steps):
        size = decide(rules, size, step(work_s, train_s, size.wanted))
        sizes.append(size.wanted)
    return sizes


def turns(sizes: list[int]) -> int:
    changes = [b - a for a, b in itertools.pairwise(sizes) if a != b]
    return sum(a * b < 0 for a, b in itertools.pairwise(changes))


def test_generation_that_is_behind_gets_workers_until_it_is_not() -> None:
    sizes = settle(work_s=40.0, train_s=10.0, workers=1)
    assert sizes[-1] == 4
    assert sizes == sorted(sizes), "it never overshoots"


def test_workers_that_training_does_not_need_are_given_back() -> None:
    sizes = settle(work_s=10.0, train_s=10.0, workers=6)
    assert sizes[-1] == 2, "with one, generation would take as long as training: there is no margin"
    assert sizes == sorted(sizes, reverse=True)


def test_stages_in_balance_are_left_alone_however_much_single_steps_differ() -> None:
    rng, size, sizes = random.Random(1), PoolSize(4), [4]
    for _ in range(500):
        noisy = StageReport(40.0 / size.wanted * rng.uniform(0.85, 1.15), 10.0 * rng.uniform(0.95, 1.05), size.wanted)
        size = decide(RULES, size, noisy)
        sizes.append(size.wanted)
    assert set(sizes) == {4}


def test_it_takes_as_many_steps_as_its_patience_says_to_change_anything() -> None:
    sizes = settle(work_s=40.0, train_s=10.0, workers=1, steps=8)
    assert sizes == [1, 1, 1, 1, 2, 2, 2, 2, 3], "three steps of one size, after one that is not judged"


def test_a_step_in_which_the_number_changed_is_not_judged() -> None:
    size = PoolSize(3, workers=3, seen=(step(90.0, 10.0, 3),) * 2)
    assert decide(RULES, size, step(90.0, 10.0, 2)) == PoolSize(3, workers=2), "one was lost"


def test_a_worker_that_does_not_come_is_waited_for_while_there_is_a_gap_and_no_further_one_is_asked_for() -> None:
    size = PoolSize(3, workers=2)
    for _ in range(20):
        size = decide(RULES, size, step(90.0, 10.0, 2))
        assert size.wanted == 3
    for _ in range(20):
        size = decide(RULES, size, step(20.0, 10.0, 2))
    assert size.wanted == 2, "the gap has closed by itself"


def test_machines_that_are_on_their_way_are_not_sent_back_while_there_is_a_gap() -> None:
    """A pool of machines begins with all that it may have, and the first of them comes after the first steps."""
    size = PoolSize(4)
    for workers in (1, 1, 1, 1, 1, 2, 2, 2, 2, 2, 4, 4, 4):
        size = decide(RULES, size, step(90.0, 10.0, workers))
        assert size.wanted == 4


def test_a_tail_that_no_worker_can_shorten_brings_no_more_than_one() -> None:
    size = PoolSize(2)
    for _ in range(100):
        size = decide(RULES, size, step(20.0, 10.0, size.wanted, tail_s=20.0))
    assert size.wanted == 3


def test_when_outputs_lengthen_it_grows_again_though_the_last_worker_did_not_pay() -> None:
    size = PoolSize(2)
    for i in range(100):
        size = decide(RULES, size, step(20.0, 10.0, size.wanted, tail_s=20.0 if i < 30 else 0.0))
    assert size.wanted == 3, "it was one too many at first"
    for _ in range(100):
        size = decide(RULES, size, step(90.0, 10.0, size.wanted))
    assert size.wanted == 8


def test_where_a_worker_costs_more_than_it_saves_there_is_no_further_one() -> None:
    """A worker of a third of the price of everything has to take off a third of T_gen: the second and third do."""
    wanted = []
    for share in (0.05, 0.3):
        size = PoolSize(1)
        for _ in range(100):
            size = decide(RULES, size, step(80.0, 5.0, size.wanted, price_share=share))
        wanted.append(size.wanted)
    assert wanted == [8, 4], "the fourth takes off a quarter, and is the last one"


SECONDS = st.floats(0.1, 1e4)


@given(SECONDS, SECONDS, st.integers(1, 12), st.integers(1, 4), st.integers(0, 6), st.integers(1, 4))
def test_it_stays_within_its_bounds_and_comes_to_rest(
    work_s: float, train_s: float, begin: int, least: int, more: int, patience: int
) -> None:
    rules = PoolRules(least, least + more, patience)
    sizes = settle(work_s, train_s, begin, rules, steps=120)
    assert all(least <= n <= least + more for n in sizes[1:])
    assert len(set(sizes[-20:])) == 1, "no number is asked for and given back for ever"
    assert turns(sizes[1:]) == 0, "nor even once"


@given(st.lists(st.tuples(SECONDS, SECONDS), min_size=1, max_size=12), st.integers(0, 2**32))
def test_whatever_the_figures_are_it_turns_round_seldom_and_moves_one_by_one(
    figures: list[tuple[float, float]], seed: int
) -> None:
    rng, size, sizes = random.Random(seed), PoolSize(4), [4]
    for _ in range(600):
        gen_s, train_s = rng.choice(figures)
        size = decide(RULES, size, StageReport(gen_s, train_s, size.wanted))
        sizes.append(size.wanted)
    assert all(abs(b - a) <= 1 for a, b in itertools.pairwise(sizes))
    assert turns(sizes) <= math.log2(600 / RULES.patience) + 600 / (RULES.patience << 5)


def test_the_worst_figures_turn_it_round_no_more_often_than_that() -> None:
    """What it has is always wrong: as soon as it has grown there should be fewer, and the other way round."""
    size, sizes = PoolSize(4), [4]
    for _ in range(600):
        behind = size.went <= 0
        size = decide(RULES, size, StageReport(100.0 if behind else 1.0, 10.0, size.wanted))
        sizes.append(size.wanted)
    assert 4 <= turns(sizes) <= math.log2(600 / RULES.patience) + 600 / (RULES.patience << 5)
