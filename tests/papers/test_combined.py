"""The clairvoyant bound against exhaustive search; what the combined cluster conserves; no run beats the bound."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from actors.scheduler.policies import stage_balance
from actors.scheduler.policies.generation_time import Instance
from configs.studies.combined import CombinedStreamStudy
from configs.studies.rlboost import HYBRID, HybridSetup
from configs.studies.streamrl import MODELS, Ranker, Workload
from supervisors.providers.trace_generator import Market, generate
from supervisors.providers.traces import Trace, TraceEvent
from supervisors.simulation.cluster import clairvoyant
from supervisors.simulation.cluster.clairvoyant import Supply
from supervisors.simulation.cluster.combined import CombinedCluster, Figures, Machines, Rules
from supervisors.simulation.cluster.costs import DecodePace
from supervisors.simulation.cluster.hybrid import HybridCluster, Options
from supervisors.simulation.cluster.moving_engine import Sample
from supervisors.simulation.cluster.overlapping.steps import Steps
from supervisors.simulation.cluster.overlapping.trainer import Trainer
from supervisors.simulation.studies import combined
from supervisors.simulation.studies.combined import HybridJob
from supervisors.simulation.studies.streamrl_bench import Bench

PROMPT = 2

# ------------------------------------------------------------ the bound, by brute force


@dataclass(frozen=True)
class Case:
    """Samples of one token count each, in steps of ``per_step``.

    Each sample is trained alone; with an ``early`` part, a step is a group, and the rest waits for all of it.
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

    @property
    def group(self) -> int:
        return self.per_step if self.early else 1

    @property
    def parts(self) -> list[float]:
        """In which a sample is trained."""
        return [self.early, 1 - self.early] if self.early else [1.0]

    def bound_s(self) -> float:
        demands = [
            clairvoyant.demand(
                self.instance,
                PROMPT,
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


CASES = st.builds(
    Case,
    lengths=st.tuples(*[st.integers(1, 2)] * 3),
    per_step=st.sampled_from([1, 3]),
    train_s=st.tuples(*[st.sampled_from([0.5, 1.0, 4.0])] * 3),
    instance=st.builds(
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
    ),
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
    demands = [clairvoyant.demand(instance, 0, lengths, train_s, 1)] * 10
    held, all_held = (
        clairvoyant.earliest_ends_s(demands, Supply(8, lambda a, b: 0.0, 40.0, engines, 1))[-1] for engines in (1, 8)
    )
    assert held <= run.ends_s[-1] < all_held


def test_work_that_no_engine_can_do_is_told() -> None:
    instance = Instance(pace(1.0, 0.5, 0.1, 0.2, 0.01), places=1, kv_tokens=100.0)
    with pytest.raises(ValueError, match="no machine ever gives"):
        Case((1, 1, 1), 3, (1.0,) * 3, instance, local=0, others=0, staleness=0, step_s=0.0).bound_s()


# ------------------------------------------------------------ the cluster

SMALL = HybridSetup(prompts=8, boot_s=20.0)
MODEL = HYBRID["8B"]


def spot_trace(seed: int) -> Trace:
    market = Market(nodes_max=3, life_mean_s=120, absent_mean_s=60, crunch_every_s=300, crunch_mean_s=100, notice_s=0)
    return generate(market, 20_000, seed)


@settings(max_examples=4, deadline=None, derandomize=True)
@given(seed=st.integers(0, 1000), staleness=st.integers(0, 2))
def test_every_sample_is_trained_once_in_order_and_no_run_beats_the_bound(seed: int, staleness: int) -> None:
    job, trace = HybridJob(MODEL, SMALL, Ranker(), seed, staleness), spot_trace(seed)
    figures = job.run(trace, steps=3)
    drawn = HybridCluster(MODEL, SMALL, Options(), seed=seed)
    for lengths, tokens in zip(figures.lengths, figures.tokens, strict=True):
        samples = drawn.draw()
        assert [s.length for s in samples] == lengths.tolist()
        assert tokens == sum(s.prompt_tokens + s.length for s in samples)
    assert figures.ends_s == sorted(figures.ends_s)
    bound_s, dollars = job.bounds(figures, trace)
    assert bound_s <= figures.ends_s[-1]
    assert dollars <= figures.costs[-1]


def test_a_trainer_without_a_whole_group_does_what_needs_no_advantage_and_no_more_than_once() -> None:
    """Two groups of two, 3 s a sample of which one is early; the second sample of group 1 comes last."""
    samples = [Sample(i, i // 2, 10, 100) for i in range(4)]
    machines = Machines(
        instance=Instance(pace(1.0, 0.5, 0.1, 0.2, 0.01), places=4), fixed=1, local=0, train_s=lambda ss: 3.0 * len(ss),
        step_s=1.0, pull_s=lambda _: 0.0, load_s=0.0, early=1 / 3,
    )  # fmt: skip
    steps = Steps(lambda _: samples, lambda _, ss: np.full(len(ss), 100.0), machines, "arrival")
    steps.open_for(0, 0)
    step, trainer = steps.open[0], Trainer(machines)
    steps.finished(step.samples[0])
    trainer.begin(0.0, step)
    assert trainer.next_s() == pytest.approx(1.0), "the early part of the one sample that is there"
    for sample in step.samples[1:3]:
        steps.finished(sample)
    assert not trainer.end(1.0, step)
    trainer.begin(1.0, step)
    assert trainer.next_s() == pytest.approx(1.0 + 2.0 + 3.0), "a whole group first, without what is done of it"
    assert not trainer.end(6.0, step)
    trainer.begin(6.0, step)
    assert trainer.next_s() == pytest.approx(7.0)
    assert not trainer.end(7.0, step)
    trainer.begin(7.0, step)
    assert trainer.idle, "nothing is done twice"
    steps.finished(step.samples[3])
    trainer.begin(9.0, step)
    assert trainer.next_s() == pytest.approx(9.0 + 2.0 + 3.0)
    assert not trainer.end(14.0, step)
    assert trainer.end(15.0, step), "the optimizer has run"


def test_nothing_is_expected_beyond_the_longest_response_that_is_allowed() -> None:
    samples = [Sample(i, i, 10, 80) for i in range(2)]
    machines = Machines(
        instance=Instance(pace(1.0, 0.5, 0.1, 0.2, 0.01), places=4), fixed=1, local=0, train_s=lambda ss: 3.0 * len(ss),
        step_s=1.0, pull_s=lambda _: 0.0, load_s=0.0, longest_tokens=100.0,
    )  # fmt: skip
    steps = Steps(lambda _: samples, lambda _, ss: np.array([50.0, 400.0]), machines, "longest")
    steps.open_for(0, 0)
    short, long = steps.open[0].samples
    assert steps.open[0].expected.tolist() == [50.0, 100.0]
    assert [steps.left(s, 0.0, 0).tokens for s in (short, long)] == [50.0, 100.0]
    assert steps.left(short, 60.0, 0).tokens == pytest.approx(6.0), "beyond what was expected: a tenth of what it has"
    assert steps.left(long, 98.0, 0).tokens == 2.0
    assert steps.left(long, 100.0, 0).tokens == 1.0


def test_a_job_opens_no_step_that_it_does_not_have() -> None:
    work = Workload(samples=64, iterations=4)
    one = Bench(work, MODELS["7B"].model_copy(update={"devices": 24}), 0.25, 0)
    drawn: list[int] = []

    def lengths(self: Bench, iteration: int) -> np.ndarray:
        drawn.append(iteration)
        return real(self, iteration)

    with pytest.MonkeyPatch.context() as patch:
        real = Bench.lengths
        patch.setattr(Bench, "lengths", lengths)
        figures = combined.run_stream(one, stage_balance.Split(8, 16, 0.0), 2, 4)
    assert sorted(set(drawn)) == [0, 1, 2, 3]
    assert len(figures.ends_s) == 4


def test_devices_that_train_generate_at_the_begin_of_a_job_and_never_again() -> None:
    """One change over, and the first step ends sooner than with a trainer that only waits for it."""
    work = Workload(samples=256, iterations=4)
    one = Bench(work, MODELS["7B"].model_copy(update={"devices": 24}), 0.5, 0)
    split = stage_balance.Split(1, 23, 0.0)  # so few that it would pay to go back
    figures = combined.run_stream(one, split, 1, 4)
    assert figures.changes == 1
    with pytest.MonkeyPatch.context() as patch:
        real = combined.Machines
        patch.setattr(combined, "Machines", lambda **given: real(**{**given, "local": 0}))
        apart = combined.run_stream(one, split, 1, 4)
    assert apart.changes == 0
    assert figures.ends_s[0] < apart.ends_s[0]


def test_the_policy_knows_the_longest_response_and_what_a_change_of_sides_takes() -> None:
    """On both papers' scenarios; without it a ranker's errors are believed, and trainers begin before they can."""
    told: list[dict[str, Any]] = []
    with pytest.MonkeyPatch.context() as patch:
        real, rules = combined.Machines, list[Rules]()
        patch.setattr(combined, "Machines", lambda **given: told.append(given) or real(**given))
        patch.setattr(combined, "Rules", lambda *given, **more: rules.append(Rules(*given, **more)) or rules[-1])
        one = Bench(Workload(samples=64), MODELS["7B"].model_copy(update={"devices": 24}), 0.25, 0)
        combined.run_stream(one, stage_balance.Split(8, 16, 0.0), 1, 2)
        nobody = Trace("nobody", (), math.inf)
        HybridJob(MODEL, combined.replace_boot(SMALL), Ranker(), 1, 0).run(nobody, steps=1)
    stream, hybrid = told
    assert stream["longest_tokens"] == one.longest_tokens < math.inf
    assert rules[0].slack_s == -stream["switch_s"] < 0
    assert hybrid["longest_tokens"] == MODEL.lengths.max_tokens
    assert hybrid["start_s"] == SMALL.switch_s > 0


def test_a_split_is_found_by_machines_first_and_then_by_ever_fewer_devices() -> None:
    """No split one engine aside is faster in the short runs that it was chosen by."""
    one = Bench(Workload(samples=512), MODELS["7B"].model_copy(update={"devices": 24}), 0.25, 0)
    split = combined.split_stream(one, 1)
    assert split.rollout % 8, "an end between two machines, in this case"
    other = replace(one, seed=one.seed + combined._OTHER_DRAWS)
    steps_s = [
        combined.run_stream(other, stage_balance.Split(x, 24 - x, 0.0), 1, combined._SHORT_RUN).steady_step_s()
        for x in (split.rollout, split.rollout - 1, split.rollout + 1)
    ]
    assert steps_s[0] == min(steps_s) == split.iteration_s


def test_rlboost_itself_never_beats_the_on_policy_bound() -> None:
    trace = Trace("fixed", tuple(TraceEvent(0.0, f"fixed-{i}", "up") for i in range(3)), math.inf)
    cluster = HybridCluster(MODEL, SMALL, Options(target=3), seed=2)
    cluster.place_now(3)
    steps = [cluster.step(cluster.draw()) for _ in range(4)]
    job = HybridJob(MODEL, combined.replace_boot(SMALL), Ranker(), 2, 0)
    figures = job.run(trace, steps=4)
    assert job.bounds(figures, trace)[0] <= sum(step.seconds for step in steps)


def test_without_other_machines_it_is_colocation_and_with_them_faster() -> None:
    none, some = (
        HybridJob(MODEL, combined.replace_boot(SMALL), Ranker(), 1, 1).run(
            Trace("fixed", tuple(TraceEvent(0.0, f"{i}", "up") for i in range(n)), math.inf), steps=4
        )
        for n in (0, 3)
    )
    assert none.rented_s == 0.0
    assert some.ends_s[-1] < none.ends_s[-1]


def test_overlapping_steps_beat_one_batch_after_the_other_on_the_same_devices() -> None:
    work = Workload(samples=128, iterations=4)
    one = Bench(work, MODELS["7B"].model_copy(update={"devices": 24}), 0.25, 0)
    _, overlapping = combined.combined_stream(one, 1)
    _, apart = combined.combined_stream(one, 0)
    end_s = overlapping.ends_s[-1]
    assert combined.bound_stream_s(one, 4, 1) <= end_s < apart.ends_s[-1]


@pytest.mark.parametrize("staleness", [0, 1, 2])
def test_with_any_staleness_no_run_beats_the_bound_of_its_first_steps(staleness: int) -> None:
    """Each step's end against the bound of a job that ends there: cold starts included."""
    work = Workload(samples=96, iterations=5)
    one = Bench(work, MODELS["7B"].model_copy(update={"devices": 16}), 0.25, staleness)
    _, figures = combined.combined_stream(one, staleness)
    for steps, end_s in enumerate(figures.ends_s, start=1):
        assert combined.bound_stream_s(one, steps, staleness) <= end_s


def test_work_that_waits_for_a_version_makes_the_bound_of_all_steps_later_by_a_cold_start() -> None:
    """Before the first end nobody can do the work of steps that wait for it."""
    long = np.array([50.0])
    first = clairvoyant.Demand(work_s=np.array([10.0]), alone_s=long, train_s=np.array([5.0]))
    supply = Supply(local=1.0, others_s=lambda a, b: 0.0, step_s=0.0, step_engines=1.0, staleness=1)
    ends = clairvoyant.earliest_ends_s([first] * 3, supply)
    assert ends[0] == pytest.approx(55.0)  # alone, then its training
    assert ends[2] == pytest.approx(max(55.0 + 5 + 5 + 10, 55.0 + 55.0))
    short = clairvoyant.Demand(work_s=np.array([10.0]), alone_s=np.array([1.0]), train_s=np.array([5.0]))
    later = clairvoyant.earliest_ends_s([first, *[short] * 4], supply)
    assert later[4] == pytest.approx(55.0 + 4 * 5 + 3 * 10)  # not 5 * 15: until 55 s there was work for 25 s only


def test_the_hand_over_learns_how_far_its_estimate_is_off(monkeypatch: pytest.MonkeyPatch) -> None:
    """Strictly on-policy the same steps are done sooner than with the estimate taken as it is, but for the first."""
    trace = Trace("fixed", tuple(TraceEvent(0.0, f"{i}", "up") for i in range(6)), math.inf)
    job = HybridJob(HYBRID["14B"], combined.replace_boot(HybridSetup()), Ranker(), 0, 0)

    def run(*, learns: bool) -> list[float]:
        rules = Rules(0, order="both_ends", slack_s=0.0, learns=learns)
        monkeypatch.setattr(combined, "Rules", lambda *_, **__: rules)
        return job.run(trace, steps=4).ends_s

    learned, plain = run(learns=True), run(learns=False)
    assert learned[0] == plain[0]
    assert learned[-1] < plain[-1]


def test_a_wrong_ranker_costs_time_and_loses_nothing() -> None:
    good, bad = (HybridJob(MODEL, SMALL, Ranker(sigma=sigma), 3, 1).run(spot_trace(3), steps=3) for sigma in (0.0, 3.0))
    assert [a.tolist() for a in good.lengths] == [b.tolist() for b in bad.lengths]


def test_the_study_names_the_cells_of_the_figure() -> None:
    study = CombinedStreamStudy(
        kind="combined_streamrl", models=["7B"], variants=["5K"], workload=Workload(samples=64, iterations=6)
    )
    measures = combined.streamrl(study, 0)
    assert {"7B.5K.over_streamrl", "7B.5K.of_bound"} <= set(measures)
    assert 0 < measures["7B.5K.over_streamrl_split_anew"] <= measures["7B.5K.over_streamrl"]
    assert 0 < measures["7B.5K.of_bound"] <= 1
    assert 0 < measures["7B.5K.of_bound_long"] <= 1


def test_streamrls_fastest_split_for_lengths_that_are_known_is_no_slower_than_any_other() -> None:
    one = Bench(Workload(samples=64, iterations=3), MODELS["7B"].model_copy(update={"devices": 24}), 0.25, 0)
    times = [one.iterations_s(["async"], "simulated", rollout=x, train=24 - x)["async"] for x in (8, 16)]
    assert combined.fastest_async_s(one) == min(times) < max(times)


def test_the_pace_of_a_job_leaves_out_its_first_four_steps_and_its_last() -> None:
    assert Figures(ends_s=[100.0, 110.0, 115.0, 120.0, 130.0, 142.0, 143.0]).steady_step_s() == 11.0
    with pytest.raises(ValueError, match="5 steps have no middle"):
        Figures(ends_s=[1.0, 2.0, 3.0, 4.0, 5.0]).steady_step_s()


def test_a_study_too_short_to_have_a_middle_is_told_so() -> None:
    with pytest.raises(
        ValidationError, match="iterations is 5; the first four and the last are left out, so give 6 or more"
    ):
        CombinedStreamStudy(kind="combined_streamrl", workload=Workload(iterations=5))
