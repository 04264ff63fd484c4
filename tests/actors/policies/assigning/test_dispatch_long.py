"""Who gets the long samples: everything is dealt once, and the replay never chooses worse than no dedicated workers."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from actors.policies.assigning import dispatch_long
from actors.policies.assigning.dispatch_long import Dispatch, Past, decide
from actors.policies.assigning.generation_time import Instance, finish_times_s
from benchmarks.papers.cluster.lengths import as_lengths


@dataclass(frozen=True)
class Pace:
    fixed_s: float = 0.008
    sequence_s: float = 0.0001

    def step_s(self, batch: float, context_tokens: float) -> float:
        return self.fixed_s + self.sequence_s * batch


def ends_s(dispatch: Dispatch, lengths: np.ndarray, instances: list[Instance]) -> float:
    hands = zip(dispatch.workers, dispatch.samples, strict=True)
    work = [(instances[w], [*instances[w].held_tokens, *lengths[hand].astype(int).tolist()]) for w, hand in hands]
    return max(finish_times_s(instance, [10] * len(w), w).max(initial=0.0) for instance, w in work)


@settings(max_examples=40)
@given(st.lists(st.integers(1, 5000), min_size=1, max_size=60), st.integers(1, 7), st.integers(1, 40))
@pytest.mark.parametrize("dedicated", [None, 0])
def test_every_sample_is_dealt_once_and_each_worker_begins_with_its_longest(
    dedicated: int | None, lengths: list[int], workers: int, places: int
) -> None:
    estimates = np.array(lengths, np.float64)
    dispatch = decide(estimates, [Instance(Pace(), places)] * workers, prompt_tokens=10, dedicated=dedicated)
    assert sorted(np.concatenate(dispatch.samples).tolist()) == list(range(len(lengths)))
    assert sorted(dispatch.workers) == list(range(workers))
    assert all((np.diff(estimates[hand]) <= 0).all() for hand in dispatch.samples)
    assert 0 <= dispatch.dedicated < max(workers, 1)


def test_dedicated_workers_get_the_longest_and_no_other() -> None:
    """A heavy batch: four workers with two long samples each end sooner than nine with a long one and eight short."""
    lengths = np.concatenate([np.full(8, 20_000.0), np.full(80, 4000.0)])
    instances = [Instance(Pace(sequence_s=0.004), 64)] * 9
    dispatch = decide(lengths, instances, prompt_tokens=10, alpha=8 / 88)
    assert dispatch.dedicated == 4
    assert all(hand.max() < 8 for hand in dispatch.samples[: dispatch.dedicated])
    assert all(hand.min() >= 8 for hand in dispatch.samples[dispatch.dedicated :])


@settings(max_examples=25, deadline=None)
@given(
    st.integers(0, 10_000),
    st.lists(st.lists(st.integers(1, 20_000), max_size=4).map(tuple), min_size=2, max_size=8),
    st.sampled_from([4, 16, 64]),
)
def test_with_equal_workers_the_replay_is_no_worse_than_longest_first_alone(
    seed: int, held: list[tuple[int, ...]], places: int
) -> None:
    """Zero dedicated workers is among what it compares, with true lengths, and with what each still has."""
    lengths = np.floor(np.random.default_rng(seed).pareto(1.5, 80) * 500 + 50)
    instances = [Instance(Pace(sequence_s=0.001), places, held_tokens=tokens) for tokens in held]
    chosen = decide(lengths, instances, prompt_tokens=10)
    plain = decide(lengths, instances, prompt_tokens=10, dedicated=0)
    assert ends_s(chosen, lengths, instances) <= ends_s(plain, lengths, instances) + 1e-9


def test_large_pools_are_searched_on_a_part_and_dealt_whole() -> None:
    """Ten times the workers and samples of the case above, and about ten times the dedicated ones."""
    lengths = np.concatenate([np.full(80, 20_000.0), np.full(800, 4000.0)])
    dispatch = decide(lengths, [Instance(Pace(sequence_s=0.004), 64)] * 90, prompt_tokens=10, alpha=80 / 880)
    assert 35 <= dispatch.dedicated <= 60
    assert sorted(np.concatenate(dispatch.samples).tolist()) == list(range(880))


def test_of_a_pool_that_is_searched_in_part_as_large_a_part_is_dedicated() -> None:
    """57 workers, of which 29 are looked at: what those few are told holds for all, to the nearest worker."""
    lengths = np.concatenate([np.full(80, 20_000.0), np.full(400, 4000.0)])
    heavy = Instance(Pace(sequence_s=0.004), 64)
    few = decide(lengths, [heavy] * 29, prompt_tokens=10, alpha=80 / 480).dedicated
    many = decide(np.repeat(lengths, 2), [heavy] * 57, prompt_tokens=10, alpha=80 / 480).dedicated
    assert few > 0
    assert many == round(few * 57 / 29) != 2 * few


def test_when_dedicating_gains_nothing_nobody_is_dedicated() -> None:
    """Equal lengths, and a batch that costs nothing."""
    dispatch = decide(np.full(40, 100.0), [Instance(Pace(sequence_s=0.0), 64)] * 4, prompt_tokens=10)
    assert dispatch.dedicated == 0


def ranker(seed: int, sigma: float) -> list[Past]:
    """Batches with a long tail, and what a ranker said of them; ``inf``: one that knows nothing."""
    rng = np.random.default_rng(seed)
    batches: list[Past] = []
    for _ in range(5):
        lengths = np.floor(rng.pareto(1.5, 160) * 500 + 50)
        said = rng.permutation(lengths) if sigma == np.inf else lengths * np.exp(sigma * rng.standard_normal(160))
        batches.append(Past(said, lengths))
    return batches


@pytest.mark.parametrize("sigma", [0.0, np.inf])
def test_a_ranker_is_trusted_as_far_as_it_has_been_right(sigma: float) -> None:
    """Speed over longest first alone, mean of twelve. At its word, a ranking by chance costs more than a tenth."""
    workers, speed = [Instance(Pace(sequence_s=0.004), 32)] * 8, {"word": 0.0, "hindsight": 0.0}
    for seed in range(12):
        *past, now = ranker(seed, sigma)
        plain = decide(now.estimates, workers, prompt_tokens=10, dedicated=0)
        for name, known in {"word": None, "hindsight": past}.items():
            chosen = decide(now.estimates, workers, prompt_tokens=10, past=known)
            speed[name] += ends_s(plain, now.lengths, workers) / ends_s(chosen, now.lengths, workers) / 12
    assert speed["hindsight"] >= 1.0 - 0.02 * np.isinf(sigma)
    assert speed["word"] < 0.9 if sigma else speed["word"] >= 1.0


def test_without_a_past_to_look_back_on_nobody_is_dedicated() -> None:
    lengths = np.concatenate([np.full(8, 20_000.0), np.full(80, 4000.0)])
    instances = [Instance(Pace(sequence_s=0.004), 64)] * 9
    at_its_word, no_past, right = (
        decide(lengths, instances, prompt_tokens=10, alpha=8 / 88, past=past)
        for past in (None, [], [Past(lengths, lengths)])
    )
    assert (at_its_word.dedicated, no_past.dedicated, right.dedicated) == (4, 0, 4)


def test_a_faster_worker_gets_more_and_long_samples_go_to_the_one_with_the_fastest_small_batch() -> None:
    slow, fast = Instance(Pace(0.02, 0.0002), 32), Instance(Pace(0.005, 0.00005), 32)
    lengths = np.concatenate([np.full(4, 9000.0), np.full(60, 300.0)])
    dispatch = decide(lengths, [slow, fast], prompt_tokens=10, dedicated=0)
    assert dispatch.workers == [1, 0]
    assert lengths[dispatch.samples[0]].sum() > 2 * lengths[dispatch.samples[1]].sum()


def test_a_worker_that_still_has_much_of_the_step_before_is_dealt_little() -> None:
    tail, idle = Instance(Pace(), 32, held_tokens=(6000, 6000)), Instance(Pace(), 32)
    lengths = np.full(60, 300.0)
    dispatch = decide(lengths, [tail, idle], prompt_tokens=10, dedicated=0)
    dealt = dict(zip(dispatch.workers, map(len, dispatch.samples), strict=True))
    assert dealt == {0: 10, 1: 50}


def test_a_worker_whose_cache_holds_fewer_gets_less() -> None:
    """Both decode at one pace, but a quarter of the cache runs a quarter of the share at once."""
    large, small = (Instance(Pace(0.02, 0.00001), 64, kv_tokens=64 * kv, reserve_tokens=1000) for kv in (1000.0, 250.0))
    lengths = np.full(128, 500.0)
    dispatch = decide(lengths, [large, small], prompt_tokens=10, dedicated=0)
    share = {worker: len(hand) for worker, hand in zip(dispatch.workers, dispatch.samples, strict=True)}
    assert share[0] > 3 * share[1]


def test_estimates_that_only_rank_take_the_lengths_of_recent_samples() -> None:
    lengths = as_lengths(np.array([0.3, 0.9, 0.1]), np.array([100.0, 200.0, 300.0, 400.0, 500.0]))
    assert lengths.argsort().tolist() == [2, 0, 1]
    assert lengths[0] == pytest.approx(300.0)
    assert lengths.max() <= 500.0


def test_alpha_of_the_paper_is_a_fifth() -> None:
    assert pytest.approx(0.2) == dispatch_long.ALPHA
