"""The clairvoyant bound against exhaustive search: no schedule at all ends before it."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass, replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from actors.scheduler.policies.generation_time import Instance
from supervisors.simulation.cluster import clairvoyant
from supervisors.simulation.cluster.clairvoyant import Demand, Kind, Supply
from supervisors.simulation.cluster.combined import CombinedCluster, Machines, Rules
from supervisors.simulation.cluster.costs import DecodePace
from supervisors.simulation.cluster.moving_engine import Sample

PROMPT = 2


@dataclass(frozen=True)
class Case:
    """Samples of one token count each, in steps of ``per_step``.

    Each sample is trained alone; with an ``early`` part, a step is a group, and the rest waits for all of it. The bound
    is one for engines of this kind or of any of the ``other_kinds``.
    """

    lengths: tuple[int, ...]
    per_step: int
    train_s: tuple[float, ...]
    instance: Instance
    local: int
    others: int
    staleness: int
    step_s: float
    early: float = 0.0
    other_kinds: tuple[Kind, ...] = ()

    @property
    def group(self) -> int:
        return self.per_step if self.early else 1

    @property
    def parts(self) -> list[float]:
        """In which a sample is trained."""
        return [self.early, 1 - self.early] if self.early else [1.0]

    def bound_s(self) -> float:
        kinds = [Kind(self.instance), *self.other_kinds]
        costs = clairvoyant.token_costs(kinds, PROMPT, np.array(self.lengths))
        demands = [
            clairvoyant.demand(
                costs,
                np.array(self.lengths[k : k + self.per_step]),
                np.array(self.train_s[k : k + self.per_step]),
                self.group,
                self.early,
            )
            for k in range(0, len(self.lengths), self.per_step)
        ]
        supply = Supply(self.local, lambda a, b: self.others * (b - a), self.step_s, self.local, self.staleness)
        return clairvoyant.earliest_ends_s(demands, supply)[-1]


State = tuple[tuple[int, ...], tuple[tuple[float, tuple[int, ...]], ...], tuple[float, int], frozenset[int]]
"""Tokens of each sample; for each engine its step's rest and samples; the trainer's rest and part; what is trained.

Parts of samples are numbered sample by sample.
"""


def optimum_s(case: Case) -> float:
    """The best end over all schedules: any samples on any engine at each step, moved for nothing, any idling."""
    best: dict[State, float] = {}
    engines, parts = case.local + case.others, len(case.parts)
    per_step = case.per_step * parts
    least = [math.inf]

    def step_s(samples: tuple[int, ...], tokens: tuple[int, ...]) -> float:
        contexts = [PROMPT + tokens[i] + 0.5 for i in samples]
        prefill_s = sum(PROMPT * case.instance.prefill_token_s for i in samples if not tokens[i])
        return case.instance.pace.step_s(len(samples), sum(contexts) / len(samples)) + prefill_s

    def may(sample: int, trained: frozenset[int]) -> bool:
        """Its step is open."""
        return len(trained) >= per_step * (sample // case.per_step - case.staleness)

    def trainable(part: int, tokens: tuple[int, ...]) -> bool:
        """Its sample is finished, and for the last part its group."""
        i, first = part // parts, part // parts // case.group * case.group
        needed = range(first, first + case.group) if part % parts == parts - 1 else [i]
        return all(tokens[n] == case.lengths[n] for n in needed)

    def choices(state: State) -> list[State]:
        """What idle engines and an idle trainer may begin now, one thing after the other."""
        tokens, busy, (train_left, in_training), trained = state
        out: list[State] = []
        taken = {i for _, samples in busy for i in samples}
        free = [i for i, n in enumerate(case.lengths) if tokens[i] < n and i not in taken and may(i, trained)]
        for e in range(engines):
            if busy[e][1] or (e < case.local and in_training >= 0):
                continue
            for count in range(1, min(len(free), case.instance.places) + 1):
                for samples in itertools.combinations(free, count):
                    if sum(PROMPT + tokens[i] + 1 for i in samples) <= case.instance.kv_tokens:
                        begun = (*busy[:e], (step_s(samples, tokens), samples), *busy[e + 1 :])
                        out.append((tokens, begun, (train_left, in_training), trained))
        if in_training < 0 and not any(samples for _, samples in busy[: case.local]):
            now = len(trained) // per_step
            for part in range(now * per_step, min((now + 1) * per_step, len(tokens) * parts)):
                if part not in trained and trainable(part, tokens):
                    lasts_s = case.train_s[part // parts] * case.parts[part % parts]
                    ends_step = (len(trained) + 1) % per_step == 0
                    out.append((tokens, busy, (lasts_s + ends_step * case.step_s, part), trained))
        return out

    def search(state: State, now_s: float) -> None:
        if now_s >= min(least[0], best.get(state, math.inf)) - 1e-12:
            return
        best[state] = now_s
        tokens, busy, (train_left, in_training), trained = state
        if len(trained) == len(tokens) * parts:
            least[0] = now_s
            return
        for following in choices(state):
            search(following, now_s)
        ends = [left for left, samples in busy if samples] + ([train_left] if in_training >= 0 else [])
        if not ends:
            return
        wait_s = min(ends)
        grown = list(tokens)
        after: list[tuple[float, tuple[int, ...]]] = []
        for left, samples in busy:
            if samples and left <= wait_s + 1e-12:
                for i in samples:
                    grown[i] += 1
                after.append((0.0, ()))
            else:
                after.append((round(left - wait_s, 9) if samples else 0.0, samples))
        training = (0.0, -1) if in_training < 0 else (round(train_left - wait_s, 9), in_training)
        if in_training >= 0 and train_left <= wait_s + 1e-12:
            trained, training = trained | {in_training}, (0.0, -1)
        search((tuple(grown), tuple(after), training, trained), now_s + wait_s)

    search((tuple(0 for _ in case.lengths), ((0.0, ()),) * engines, (0.0, -1), frozenset()), 0.0)
    return least[0]


def pace(fixed: float, weights: float, compute: float, sequence: float, context: float) -> DecodePace:
    return DecodePace(fixed, weights, compute, sequence, context)


INSTANCES = st.builds(
    Instance,
    pace=st.builds(
        pace,
        st.sampled_from([0.1, 1.0]),
        st.sampled_from([0.1, 1.0]),
        st.sampled_from([0.05, 0.6]),
        st.sampled_from([0.0, 0.3]),
        st.sampled_from([0.0, 0.1]),
    ),
    places=st.integers(1, 2),
    kv_tokens=st.sampled_from([5.0, 20.0]),
    prefill_token_s=st.sampled_from([0.0, 0.1]),
)
CASES = st.builds(
    Case,
    lengths=st.tuples(*[st.integers(1, 2)] * 3),
    per_step=st.sampled_from([1, 3]),
    train_s=st.tuples(*[st.sampled_from([0.5, 1.0, 4.0])] * 3),
    instance=INSTANCES,
    local=st.integers(0, 1),
    others=st.integers(0, 1),
    staleness=st.integers(0, 1),
    step_s=st.sampled_from([0.0, 0.5]),
    early=st.sampled_from([0.0, 0.4]),
)


@settings(max_examples=30, deadline=None, derandomize=True)
@given(CASES)
def test_no_schedule_at_all_ends_before_the_bound(case: Case) -> None:
    if case.local + case.others:
        assert case.bound_s() <= optimum_s(case) * (1 + 1e-9)


@settings(max_examples=10, deadline=None, derandomize=True)
@given(CASES, st.builds(Kind, INSTANCES))
def test_no_schedule_ends_before_the_bound_of_engines_of_its_kind_and_another(case: Case, kind: Kind) -> None:
    if case.local + case.others:
        both = replace(case, other_kinds=(kind,))
        assert both.bound_s() <= min(case.bound_s(), optimum_s(case)) * (1 + 1e-9)


def least_of(kinds: list[Kind], prompt_tokens: int, *lengths: int) -> Demand:
    """Of a job of these samples, all in one step."""
    tokens = np.array(lengths)
    return clairvoyant.demand(clairvoyant.token_costs(kinds, prompt_tokens, tokens), tokens, np.ones(len(tokens)), 1)


def test_each_token_is_counted_where_it_costs_least_and_of_engines_as_large_as_they_are() -> None:
    """With little context on the one kind, with much on the other; an engine of two devices counts twice."""
    small = Instance(pace(1.0, 0.0, 0.0, 0.0, 1.0), places=1, prefill_token_s=0.3)
    large = Instance(pace(3.0, 0.0, 0.0, 0.0, 0.0), places=1, prefill_token_s=0.2)
    one, other, both, twice = (
        least_of(kinds, 1, 4)
        for kinds in ([Kind(small)], [Kind(large)], [Kind(small), Kind(large)], [Kind(small), Kind(large, 2)])
    )
    assert one.work_s[0] == pytest.approx(4 * 1 + (1.5 + 2.5 + 3.5 + 4.5) + 0.3)
    assert other.work_s[0] == pytest.approx(4 * 3 + 0.2)
    assert both.work_s[0] == both.alone_s[0] == pytest.approx(2.5 + 3 + 3 + 3 + 0.2)
    assert twice.work_s[0] == pytest.approx(2.5 + 3.5 + 4.5 + 5.5 + 0.3), "twice 0.2 for a prefill is more"
    assert twice.alone_s[0] == both.alone_s[0], "alone, a sample has the fast engine whatever that takes"


def test_what_a_step_costs_is_shared_by_cache_where_it_runs_out_first() -> None:
    """One sample of ten tokens after a prompt of nine: ten places, but cache for two contexts of fourteen."""
    roomy = Instance(pace(2.0, 1.0, 0.0, 0.0, 0.0), places=10, kv_tokens=1e9)
    tight = replace(roomy, kv_tokens=28.0)
    assert least_of([Kind(roomy)], 9, 10).work_s[0] == pytest.approx(10 * 3 / 10)
    assert least_of([Kind(tight)], 9, 10).work_s[0] == pytest.approx(3 * (9 + 5) * 10 / 28)


def test_products_take_the_place_of_reading_where_they_take_longer_in_a_full_batch() -> None:
    instance = Instance(pace(2.0, 1.0, 0.5, 0.0, 0.0), places=10, kv_tokens=1e9)
    assert least_of([Kind(instance)], 9, 10).work_s[0] == pytest.approx(10 * (2 / 10 + 0.5))


def test_samples_of_two_steps_that_share_decode_steps_are_counted_in_one_way() -> None:
    """Many short ones that places hold up, one long one that the cache does: together they take 50 decode steps."""
    instance = Instance(pace(1.0, 0.0, 0.0, 0.0, 0.0), places=10, kv_tokens=60.0)
    short, long = np.full(400, 1), np.array([50])
    costs = clairvoyant.token_costs([Kind(instance)], 1, np.concatenate([short, long]))
    demands = [clairvoyant.demand(costs, x, np.zeros(len(x)), 1) for x in (short, long)]
    supply = Supply(0, lambda a, b: b - a, 0.0, 0, staleness=1)
    assert clairvoyant.earliest_ends_s(demands, supply)[-1] <= 50 + 1e-6


def test_what_a_sample_allows_before_its_group_is_whole_is_trained_before_it() -> None:
    """One engine, one place: two of three samples are there early; the bound knows it, and is not above the optimum."""
    instance = Instance(pace(1.0, 0.5, 0.1, 0.2, 0.01), places=1, kv_tokens=100.0)
    case = Case((1, 1, 2), 3, (4.0,) * 3, instance, local=0, others=1, staleness=0, step_s=0.0)
    early = replace(case, early=0.4)
    assert 0.8 * optimum_s(early) < early.bound_s() <= optimum_s(early) * (1 + 1e-9)
    assert optimum_s(early) < optimum_s(replace(early, early=1e-9)), "without it the trainer waits for all three"
    assert early.bound_s() < replace(early, early=1e-9).bound_s()


def test_generation_ahead_of_a_version_is_not_counted_after_its_end() -> None:
    """With k = 1 samples of two steps share engine steps: what waits for the first end is the third step's only."""
    instance = Instance(pace(1.0, 0.1, 0.05, 0.0, 0.0), places=2, kv_tokens=100.0)
    case = Case((3, 3, 1), 1, (0.1, 0.1, 0.1), instance, local=1, others=0, staleness=1, step_s=0.0)
    assert case.bound_s() <= optimum_s(case) * (1 + 1e-9)
    assert case.bound_s() > 0.9 * optimum_s(case)


def test_the_bound_is_reached_where_nothing_is_relaxed() -> None:
    """One engine, one place: every token takes a whole step, and training follows."""
    instance = Instance(pace(1.0, 0.5, 0.1, 0.2, 0.01), places=1, kv_tokens=100.0)
    case = Case((2, 1, 2), 3, (0.1, 0.1, 0.1), instance, local=1, others=0, staleness=0, step_s=0.5)
    assert optimum_s(case) == pytest.approx(case.bound_s(), rel=0.01)


def test_engines_that_the_optimizer_does_not_hold_generate_meanwhile() -> None:
    """Seven that generate and one that trains: a bound that stops all eight for 40 s a step lies above this run."""
    samples = [Sample(i, i, 0, 10) for i in range(70)]
    instance = Instance(pace(1.0, 0.0, 0.0, 0.0, 0.0), places=1, kv_tokens=1e6)
    machines = Machines(
        instance=instance,
        fixed=7,
        local=1,
        train_s=lambda ss: 0.8 * len(ss),
        step_s=40.0,
        pull_s=lambda _: 0.0,
        load_s=0.0,
    )
    run = CombinedCluster(
        machines, Rules(1, returns=False), lambda _: samples, lambda _, ss: np.array([float(s.length) for s in ss])
    ).run(steps=10)
    lengths, train_s = np.full(70, 10), np.full(70, 0.1)  # on all eight
    demands = [clairvoyant.demand(clairvoyant.token_costs([Kind(instance)], 0, lengths), lengths, train_s, 1)] * 10
    held, all_held = (
        clairvoyant.earliest_ends_s(demands, Supply(8, lambda a, b: 0.0, 40.0, engines, 1))[-1] for engines in (1, 8)
    )
    assert held <= run.ends_s[-1] < all_held


def test_work_that_no_engine_can_do_is_told() -> None:
    instance = Instance(pace(1.0, 0.5, 0.1, 0.2, 0.01), places=1, kv_tokens=100.0)
    with pytest.raises(ValueError, match="no machine ever gives"):
        Case((1, 1, 1), 3, (1.0,) * 3, instance, local=0, others=0, staleness=0, step_s=0.0).bound_s()


def test_work_that_waits_for_a_version_makes_the_bound_of_all_steps_later_by_a_cold_start() -> None:
    """Before the first end nobody can do the work of steps that wait for it."""
    long = np.array([50.0])
    first = Demand(work_s=np.array([10.0]), alone_s=long, train_s=np.array([5.0]))
    supply = Supply(local=1.0, others_s=lambda a, b: 0.0, step_s=0.0, step_engines=1.0, staleness=1)
    ends = clairvoyant.earliest_ends_s([first] * 3, supply)
    assert ends[0] == pytest.approx(55.0)  # alone, then its training
    assert ends[2] == pytest.approx(max(55.0 + 5 + 5 + 10, 55.0 + 55.0))
    short = Demand(work_s=np.array([10.0]), alone_s=np.array([1.0]), train_s=np.array([5.0]))
    later = clairvoyant.earliest_ends_s([first, *[short] * 4], supply)
    assert later[4] == pytest.approx(55.0 + 4 * 5 + 3 * 10)  # not 5 * 15: until 55 s there was work for 25 s only
