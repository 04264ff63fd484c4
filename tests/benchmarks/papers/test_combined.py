"""What the combined cluster conserves, how it chooses, and that no run beats the clairvoyant bound."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from actors.policies.assigning.generation_time import Instance
from actors.policies.seeding.worth_having import StepCost
from benchmarks.papers.cluster import hybrid
from benchmarks.papers.cluster.clairvoyant.least_work import Kind
from benchmarks.papers.cluster.clairvoyant.supply import Supply
from benchmarks.papers.cluster.combined import Figures, Machines, Rules
from benchmarks.papers.cluster.costs import DecodePace
from benchmarks.papers.cluster.hybrid import Hybrid
from benchmarks.papers.cluster.moving_engine import Sample
from benchmarks.papers.cluster.overlapping.pool import Pool
from benchmarks.papers.cluster.overlapping.steps import Steps
from benchmarks.papers.cluster.overlapping.trainer import Trainer
from benchmarks.papers.cluster.splits import Split
from benchmarks.papers.setups.combined import CombinedStaticStudy, CombinedStreamStudy
from benchmarks.papers.setups.rlboost import HYBRID, HybridSetup
from benchmarks.papers.setups.streamrl import MODELS, Ranker, Workload
from benchmarks.papers.studies import combined_rlboost, combined_streamrl
from benchmarks.papers.studies.combined_rlboost import HybridJob, replace_boot
from benchmarks.papers.studies.streamrl_bench import Bench
from benchmarks.papers.trace_generator import Market, generate
from supervisors.providers.traces import Trace, TraceEvent

SMALL = HybridSetup(prompts=8, boot_s=20.0)
MODEL = HYBRID["8B"]
FOUR_PLACES = Instance(DecodePace(1.0, 0.5, 0.1, 0.2, 0.01), places=4)


def spot_trace(seed: int) -> Trace:
    market = Market(nodes_max=3, life_mean_s=120, absent_mean_s=60, crunch_every_s=300, crunch_mean_s=100, notice_s=0)
    return generate(market, 20_000, seed)


@settings(max_examples=4, deadline=None, derandomize=True)
@given(seed=st.integers(0, 1000), staleness=st.integers(0, 2))
def test_every_sample_is_trained_once_in_order_and_no_run_beats_the_bound(seed: int, staleness: int) -> None:
    job, trace = HybridJob(MODEL, SMALL, Ranker(), seed, staleness), spot_trace(seed)
    figures = job.run(trace, steps=3)
    drawn = Hybrid(MODEL, SMALL, seed)
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
        instance=FOUR_PLACES, fixed=1, local=0, train_s=lambda ss: 3.0 * len(ss),
        step_s=1.0, pull_s=lambda _: 0.0, load_s=0.0, early=1 / 3,
    )  # fmt: skip
    steps = Steps(lambda _: samples, lambda _, ss: np.full(len(ss), 100.0), machines, Rules(0, order="arrival"))
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


def test_machines_that_three_steps_in_a_row_could_do_without_are_given_back_and_taken_again() -> None:
    """Three machines; then each step's generation is worth one, and later two. Who has least to do goes first."""
    machines = Machines(
        instance=FOUR_PLACES, fixed=0, local=0, train_s=lambda ss: 3.0 * len(ss),
        step_s=1.0, pull_s=lambda _: 2.0, load_s=0.0, boot_s=60.0,
    )  # fmt: skip
    pool, lost = Pool(machines, [TraceEvent(0.0, name, "up") for name in "abc"]), list[str]()
    pool.follow_trace(0.0, 0, lambda _: None)
    assert set(pool.spot) == set("abc"), "all that are there, while too little is known"
    for count, name in enumerate("abc"):
        pool.spot[name].engine.pending.extend(Sample(10 * count + i, i, 10, 100) for i in range(count))
        pool.spot[name].engine.admit()
    one, two = (StepCost(generate_s, 10.0, 0, 10.0, 1.0) for generate_s in (10.0, 20.0))
    for cost in (two, one):
        pool.weigh(cost, lambda gone: lost.append(gone.engine.name))
    assert not lost
    for cost in (one, one):
        pool.weigh(cost, lambda gone: lost.append(gone.engine.name))
    assert lost == ["a", "b"]
    pool.follow_trace(100.0, 3, lambda _: None)
    assert set(pool.spot) == {"c"}, "none is taken that is not worth it"
    pool.weigh(two, lambda gone: lost.append(gone.engine.name))
    pool.follow_trace(100.0, 3, lambda _: None)
    assert list(pool.spot) == ["c", "a"]
    assert pool.spot["a"].ready_s == 100.0 + 60.0 + 2.0, "it boots once more"
    pool.spot["c"].engine.running.clear()
    for _ in range(3):
        pool.weigh(one, lambda gone: lost.append(gone.engine.name))
    assert list(pool.spot) == ["c"], "of two with nothing to do the one that boots"


def test_nothing_is_expected_beyond_the_longest_response_that_is_allowed() -> None:
    samples = [Sample(i, i, 10, 80) for i in range(2)]
    machines = Machines(
        instance=FOUR_PLACES, fixed=1, local=0, train_s=lambda ss: 3.0 * len(ss),
        step_s=1.0, pull_s=lambda _: 0.0, load_s=0.0, longest_tokens=100.0,
    )  # fmt: skip
    steps = Steps(lambda _: samples, lambda _, ss: np.array([50.0, 400.0]), machines, Rules(0))
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
        figures = combined_streamrl.run_stream(one, Split(8, 16, 0.0), 2, 4)
    assert sorted(set(drawn)) == [0, 1, 2, 3]
    assert len(figures.ends_s) == 4


def test_devices_that_train_generate_at_the_begin_of_a_job_and_never_again() -> None:
    """One change over, and the first step ends sooner than with a trainer that only waits for it."""
    work = Workload(samples=256, iterations=4)
    one = Bench(work, MODELS["7B"].model_copy(update={"devices": 24}), 0.5, 0)
    split = Split(1, 23, 0.0)  # so few that it would pay to go back
    figures = combined_streamrl.run_stream(one, split, 1, 4)
    assert figures.changes == 1
    with pytest.MonkeyPatch.context() as patch:
        real = combined_streamrl.Machines
        patch.setattr(combined_streamrl, "Machines", lambda **given: real(**{**given, "local": 0}))
        apart = combined_streamrl.run_stream(one, split, 1, 4)
    assert apart.changes == 0
    assert figures.ends_s[0] < apart.ends_s[0]


def test_the_policy_knows_the_longest_response_and_what_a_change_of_sides_takes() -> None:
    """On both papers' scenarios; without it a ranker's errors are believed, and trainers begin before they can."""
    told: list[dict[str, Any]] = []
    with pytest.MonkeyPatch.context() as patch:
        real, rules = combined_streamrl.Machines, list[Rules]()
        for room in (combined_streamrl, hybrid):
            patch.setattr(room, "Machines", lambda **given: told.append(given) or real(**given))
        for study in (combined_streamrl, combined_rlboost):
            patch.setattr(study, "Rules", lambda *given, **more: rules.append(Rules(*given, **more)) or rules[-1])
        one = Bench(Workload(samples=64), MODELS["7B"].model_copy(update={"devices": 24}), 0.25, 0)
        combined_streamrl.run_stream(one, Split(8, 16, 0.0), 1, 2)
        nobody = Trace("nobody", (), math.inf)
        HybridJob(MODEL, replace_boot(SMALL), Ranker(), 1, 0).run(nobody, steps=1)
    stream, reserved = told
    assert stream["longest_tokens"] == one.longest_tokens < math.inf
    assert rules[0].slack_s == -stream["switch_s"] < 0
    assert rules[-1].slack_s == -SMALL.switch_s < 0
    assert reserved["longest_tokens"] == MODEL.lengths.max_tokens
    assert reserved["start_s"] == SMALL.switch_s > 0


@pytest.mark.long
def test_a_split_is_found_by_machines_first_and_then_by_ever_fewer_devices() -> None:
    """No split one engine aside is faster in the short runs that it was chosen by."""
    one = Bench(Workload(samples=512), MODELS["7B"].model_copy(update={"devices": 24}), 0.25, 0)
    split = combined_streamrl.split_stream(one, 1)
    assert split.rollout % 8, "an end between two machines, in this case"
    other = replace(one, seed=one.seed + combined_streamrl._OTHER_DRAWS)
    steps_s = [
        combined_streamrl.run_stream(other, Split(x, 24 - x, 0.0), 1, combined_streamrl._SHORT_RUN).steady_step_s()
        for x in (split.rollout, split.rollout - 1, split.rollout + 1)
    ]
    assert steps_s[0] == min(steps_s) == split.iteration_s


def test_rlboost_itself_never_beats_the_on_policy_bound() -> None:
    trace = Trace("fixed", tuple(TraceEvent(0.0, f"fixed-{i}", "up") for i in range(3)), math.inf)
    own = Hybrid(MODEL, SMALL, 2).rlboost(workers=3, target=3).run(steps=4)
    job = HybridJob(MODEL, replace_boot(SMALL), Ranker(), 2, 0)
    figures = job.run(trace, steps=4)
    assert job.bounds(figures, trace)[0] <= own.ends_s[-1]


def test_without_other_machines_it_is_colocation_and_with_them_faster() -> None:
    none, some = (
        HybridJob(MODEL, replace_boot(SMALL), Ranker(), 1, 1).run(
            Trace("fixed", tuple(TraceEvent(0.0, f"{i}", "up") for i in range(n)), math.inf), steps=4
        )
        for n in (0, 3)
    )
    assert none.rented_s == 0.0
    assert some.ends_s[-1] < none.ends_s[-1]


def test_overlapping_steps_beat_one_batch_after_the_other_on_the_same_devices() -> None:
    work = Workload(samples=64, iterations=4)
    one = Bench(work, MODELS["7B"].model_copy(update={"devices": 24}), 0.25, 0)
    _, overlapping = combined_streamrl.combined_stream(one, 1)
    _, apart = combined_streamrl.combined_stream(one, 0)
    end_s = overlapping.ends_s[-1]
    assert combined_streamrl.bound_stream_s(one, 4, 1) <= end_s < apart.ends_s[-1]


@pytest.mark.parametrize("staleness", [0, 1, 2])
def test_with_any_staleness_no_run_beats_the_bound_of_its_first_steps(staleness: int) -> None:
    """Each step's end against the bound of a job that ends there: cold starts included."""
    work = Workload(samples=96, iterations=5)
    one = Bench(work, MODELS["7B"].model_copy(update={"devices": 16}), 0.25, staleness)
    _, figures = combined_streamrl.combined_stream(one, staleness)
    for steps, end_s in enumerate(figures.ends_s, start=1):
        assert combined_streamrl.bound_stream_s(one, steps, staleness) <= end_s


def test_the_hand_over_learns_how_far_its_estimate_is_off(monkeypatch: pytest.MonkeyPatch) -> None:
    """Strictly on-policy the same steps are done sooner than with the estimate taken as it is, but for the first."""
    trace = Trace("fixed", tuple(TraceEvent(0.0, f"{i}", "up") for i in range(6)), math.inf)
    job = HybridJob(HYBRID["14B"], replace_boot(HybridSetup()), Ranker(), 0, 0)

    def run(*, learns: bool) -> list[float]:
        rules = Rules(0, order="both_ends", slack_s=0.0, learns=learns)
        monkeypatch.setattr(combined_rlboost, "Rules", lambda *_, **__: rules)
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
    with pytest.MonkeyPatch.context() as patch:
        real, runs = combined_streamrl.run_stream, list[tuple[int, int]]()

        def run(one: Bench, *given: Any) -> Figures:
            runs.append((one.model.transformer.tensor_parallel, given[-1]))
            return real(one, *given)

        patch.setattr(combined_streamrl, "run_stream", run)
        measures = combined_streamrl.streamrl(study, 0)
    assert measures["7B.5K.tensor_parallel"] > 1
    assert runs[-1] == (measures["7B.5K.tensor_parallel"], study.long_steps), "the same engines in the longer job"
    assert {"7B.5K.over_streamrl", "7B.5K.of_bound"} <= set(measures)
    assert 0 < measures["7B.5K.over_streamrl_chosen_anew"] <= measures["7B.5K.over_streamrl"]
    assert 0 < measures["7B.5K.of_bound"] <= 1
    assert 0 < measures["7B.5K.of_bound_long"] <= 1


def test_streamrls_fastest_engines_and_split_for_lengths_that_are_known_are_no_slower_than_any_other() -> None:
    one = Bench(Workload(samples=64, iterations=3), MODELS["7B"].model_copy(update={"devices": 24}), 0.25, 0)
    times = {
        (tp, x): at.iterations_s(["async"], "simulated", rollout=x, train=24 - x)["async"]
        for tp, at in one.by_tensor_parallel().items()
        for x in range(max(tp, 4), 21, max(tp, 4))
    }
    assert {tp for tp, _ in times} == {1, 2, 4, 8}
    assert {x for tp, x in times if tp < 8} == {4, 8, 12, 16, 20}, "half machines, too"
    assert combined_streamrl.fastest_async_s(one) == min(times.values()) < min(times[1, 8], times[1, 16])


def test_engines_are_as_large_as_makes_steps_fastest_and_never_too_small_for_a_sample() -> None:
    """Few samples, all of the longest kind: what counts is how fast the weights are read."""
    one = Bench(Workload(samples=64), MODELS["7B"].model_copy(update={"devices": 16}), 1.0, 0)
    layout = combined_streamrl.lay_out(one, 1)
    steps_s = {tp: combined_streamrl.split_stream(at, 1).iteration_s for tp, at in one.by_tensor_parallel().items()}
    assert layout.tensor_parallel > 1, "larger than the paper's"
    assert layout.split.iteration_s == min(steps_s.values()) == steps_s[layout.tensor_parallel] < steps_s[1]
    large_ones = MODELS["7B"].transformer.model_copy(update={"tensor_parallel": 8})
    many = Bench(
        Workload(samples=192), MODELS["7B"].model_copy(update={"transformer": large_ones, "devices": 24}), 0.1, 0
    )
    assert combined_streamrl.lay_out(many, 1).tensor_parallel < 8, "many short ones share the reading; downwards, too"
    large = Bench(Workload(), MODELS["72B"], 1.0, 0)
    assert list(large.by_tensor_parallel()) == [4, 8], "one or two devices do not even hold the weights"
    assert list(Bench(Workload(), MODELS["32B"], 1.0, 0).by_tensor_parallel()) == [1, 2, 4, 8]
    full = Workload(prompt_tokens=10_000)
    assert list(Bench(full, MODELS["32B"], 1.0, 0).by_tensor_parallel()) == [2, 4, 8], "weights, and no whole sample"


def test_the_pace_of_a_job_leaves_out_its_first_four_steps_and_its_last() -> None:
    assert Figures(ends_s=[100.0, 110.0, 115.0, 120.0, 130.0, 142.0, 143.0]).steady_step_s() == 11.0
    with pytest.raises(ValueError, match="5 steps have no middle"):
        Figures(ends_s=[1.0, 2.0, 3.0, 4.0, 5.0]).steady_step_s()


def test_a_study_too_short_to_have_a_middle_is_told_so() -> None:
    with pytest.raises(
        ValidationError, match="iterations is 5; the first four and the last are left out, so give 6 or more"
    ):
        CombinedStreamStudy(kind="combined_streamrl", workload=Workload(iterations=5))


def test_figures_over_rlboost_are_means_over_the_draws() -> None:
    def of(draws: int, seed: int) -> dict[str, float]:
        short = SMALL.model_copy(update={"steps": 4})
        study = CombinedStaticStudy(kind="combined_static", model="8B", workers=[1], draws=draws, setup=short)
        return combined_rlboost.static(study, seed)

    both, first, second = of(2, 5), of(1, 5), of(1, 6)
    assert first["n1.over_rlboost"] != second["n1.over_rlboost"]
    assert both == {name: pytest.approx((first[name] + second[name]) / 2) for name in first}


def test_the_bound_knows_engines_of_every_size_the_scenarios_places_and_what_the_optimizer_holds() -> None:
    work = Workload(samples=4)
    one = Bench(work, MODELS["72B"], 1.0, 0)
    told: list[Supply] = []
    kinds: list[Kind] = []
    with pytest.MonkeyPatch.context() as patch:
        earliest, least = combined_streamrl.earliest_ends_s, combined_streamrl.token_costs
        patch.setattr(
            combined_streamrl, "earliest_ends_s", lambda d, supply: told.append(supply) or earliest(d, supply)
        )
        patch.setattr(combined_streamrl, "token_costs", lambda given, *more: kinds.extend(given) or least(given, *more))
        combined_streamrl.bound_stream_s(one, 2, 1)
    caches = {tp: at.pool(tp)[0].kv_tokens for tp, at in one.by_tensor_parallel().items()}
    assert [(kind.size, kind.instance.places) for kind in kinds] == [
        (tp, int(tokens // (work.prompt_tokens + one.longest_tokens))) for tp, tokens in caches.items()
    ]
    assert [kind.size for kind in kinds] == [4, 8]
    assert (told[0].local, told[0].step_engines, told[0].step_s) == (128, 15, work.train.step_s)
    state_bytes = 16 * one.model.transformer.parameters
    assert 14 * one.train_device.memory_bytes < state_bytes <= 15 * one.train_device.memory_bytes


def test_a_cluster_with_few_splits_is_split_so_that_the_trainer_fits() -> None:
    """Of 32 devices 15 hold the weights and the optimizer's state: at most 16 generate, in engines of four."""
    one = Bench(Workload(samples=64), MODELS["72B"].model_copy(update={"devices": 32}), 0.25, 0)
    split = combined_streamrl.split_stream(one, 1)
    assert split.rollout + split.train == 32
    assert 4 <= split.rollout <= 16


def test_engines_of_a_whole_machine_are_moved_as_often_as_it_pays() -> None:
    """Where the three best by full batches are not the best."""
    eight = MODELS["72B"].transformer.model_copy(update={"tensor_parallel": 8})
    one = Bench(Workload(), MODELS["72B"].model_copy(update={"transformer": eight}), 1.0, 0)
    tried: dict[int, float] = {}

    def run(_: Bench, split: Split, *given: int) -> Figures:
        """The fewer generate the faster, down to 24 devices."""
        tried[split.rollout] = step_s = abs(split.rollout - 24) + 1.0
        return Figures(ends_s=[step_s * i for i in range(1, 11)])

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(combined_streamrl, "run_stream", run)
        split = combined_streamrl.split_stream(one, 1)
    assert split.rollout == 24
    assert {16, 32} <= set(tried), "its neighbours are slower"


def test_larger_engines_are_tried_only_while_they_pay() -> None:
    one = Bench(Workload(), MODELS["7B"], 0.25, 0)
    tried: list[int] = []

    def split(at: Bench, _: int) -> Split:
        tried.append(at.model.transformer.tensor_parallel)
        return Split(8, 24, {1: 3.0, 2: 2.0, 4: 2.5, 8: 1.0}[tried[-1]])

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(combined_streamrl, "split_stream", split)
        assert combined_streamrl.lay_out(one, 1).tensor_parallel == 2
    assert tried == [1, 2, 4]


def test_a_sample_that_no_engine_of_the_paper_holds_is_told() -> None:
    one = Bench(Workload(max_tokens=2_000_000), MODELS["7B"], 1.0, 0)
    with pytest.raises(ValueError, match="1 devices of H800 hold no sample of 2000000 tokens"):
        combined_streamrl.lay_out(one, 1)
