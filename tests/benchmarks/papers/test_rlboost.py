"""The cluster on which RLBoost is simulated: what it must conserve, and that its policies are the live ones."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.papers.cluster.hybrid import Hybrid
from benchmarks.papers.cluster.moving_engine import MovingEngine, Sample
from benchmarks.papers.scenario import load_paper_scenario
from benchmarks.papers.setups.rlboost import HYBRID, HybridSetup
from benchmarks.papers.studies.rlboost import ROOT, segments
from benchmarks.papers.trace_generator import Market, generate
from benchmarks.papers.traces import nodes_mean
from supervisors.providers.trace_files import read_trace
from supervisors.providers.traces import TraceEvent

SMALL = HybridSetup(prompts=12)
MODEL = HYBRID["8B"]


def engine(places: int = 4) -> MovingEngine:
    return MovingEngine("one", Hybrid(MODEL, HybridSetup(places=places)).instance)


def drain(one: MovingEngine) -> list[Sample]:
    done: list[Sample] = []
    one.admit()
    while one.running:
        one.advance(one.next_s())
        done += one.take_finished()
    return done


def test_an_engine_finishes_every_sample_at_its_length_and_never_runs_more_than_its_places() -> None:
    one = engine(places=3)
    samples = [Sample(i, 0, 100, 50 * (i + 1)) for i in range(8)]
    one.pending.extend(samples)
    one.admit()
    assert len(one.running) == 3
    done = drain(one)
    assert sorted(s.number for s in done) == list(range(8))
    assert all(s.kept == s.length for s in done)
    assert min(done, key=lambda s: s.finished_s).number == 0
    assert one.context == 0


def test_a_sample_that_leaves_keeps_its_tokens_and_needs_only_the_rest_elsewhere() -> None:
    whole, first, second = engine(), engine(), engine()
    whole.pending.append(Sample(0, 0, 100, 2000))
    alone_s = drain(whole)[0].finished_s
    moved = Sample(0, 0, 100, 2000)
    first.pending.append(moved)
    first.admit()
    first.advance(alone_s / 2)
    first.take(moved)
    assert 900 < moved.kept < 1100
    second.pending.append(moved)
    second.now_s = alone_s / 2
    assert drain(second)[0].finished_s == pytest.approx(alone_s, rel=0.02), "but for one prefill"


def test_a_full_cache_sends_the_youngest_back_and_everybody_ends_all_the_same() -> None:
    one = engine(places=256)
    each = int(one.instance.kv_tokens / 40)
    samples = [Sample(i, 0, 10, each) for i in range(60)]
    one.pending.extend(samples)
    one.admit()
    peak = 0.0
    while one.running:
        one.advance(one.next_s())
        peak = max(peak, one.context)
        one.take_finished()
    assert all(math.isfinite(s.finished_s) for s in samples)
    assert peak <= one.instance.kv_tokens * 1.001


@settings(max_examples=15, deadline=None)
@given(seed=st.integers(0, 1000), workers=st.integers(0, 3), keep=st.booleans(), seeding=st.booleans())
def test_every_sample_is_trained_once_whoever_comes_and_goes(
    seed: int, workers: int, keep: bool, seeding: bool
) -> None:
    market = Market(nodes_max=3, life_mean_s=120, absent_mean_s=60, crunch_every_s=300, crunch_mean_s=100, notice_s=0)
    events = generate(market, 20_000, seed).events
    job = Hybrid(MODEL, SMALL, seed).rlboost(
        events, workers=workers, keep_tokens=keep, fixed_s=None if seeding else 0.0
    )
    drawn, began_s, paid = Hybrid(MODEL, SMALL, seed), 0.0, 0.0
    figures = job.run(steps=3)
    for lengths, tokens, end_s, cost in zip(
        figures.lengths, figures.tokens, figures.ends_s, figures.costs, strict=True
    ):
        samples = drawn.draw()
        assert [s.length for s in samples] == lengths.tolist()
        assert tokens == sum(s.prompt_tokens + s.length for s in samples)
        assert end_s - began_s > drawn.train_s(samples), "nothing is trained before it is there"
        assert cost - paid >= (end_s - began_s) * SMALL.reserved_price / 3600 * 0.999
        began_s, paid = end_s, cost


def test_more_workers_never_cost_throughput_and_none_gives_what_colocation_gives() -> None:
    rates: list[float] = []
    for workers in (0, 2, 5):
        job = Hybrid(MODEL, HybridSetup(), 1).rlboost(workers=workers, target=workers)
        rates.append(job.run(steps=6).rates(4)[0])
    assert rates[0] < rates[1] < rates[2]
    alone = Hybrid(MODEL, HybridSetup(), 1)
    samples = [alone.draw() for _ in range(6)][2:]
    colocated = sum(s.prompt_tokens + s.length for b in samples for s in b) / sum(map(alone.colocated_step_s, samples))
    assert rates[0] == pytest.approx(colocated, rel=0.1)


def test_a_step_that_loses_all_its_workers_after_the_window_is_finished_by_the_reserved_machines() -> None:
    job = Hybrid(MODEL, SMALL, 3).rlboost(workers=2, fixed_s=20.0)
    job.pool.expect([TraceEvent(60.0, node, "kill") for node in job.pool.spot])
    done = job.run(steps=1)
    assert not job.pool.spot
    assert done.changes == 3, "they hand over, come back for what was lost, and train"
    assert len(done.ends_s) == 1


def test_a_job_that_goes_on_after_its_end_is_the_same_as_one_that_ran_through() -> None:
    through, on = (Hybrid(MODEL, SMALL, 3).rlboost(workers=2) for _ in range(2))
    for steps in (1, 2, 3):
        on.run(steps=steps)
    assert on.figures.ends_s == pytest.approx(through.run(steps=3).ends_s)
    assert len(on.figures.windows) == 3


def test_parts_of_a_trace_are_chosen_by_their_machines_alone() -> None:
    study = load_paper_scenario(ROOT / "configs" / "papers" / "rlboost_spot.yaml").study
    assert study.kind == "rlboost_spot"
    parts = segments(read_trace(ROOT / study.trace), 7200.0)
    assert nodes_mean(parts["A"]) > nodes_mean(parts["C"]) > nodes_mean(parts["B"])
    assert {part.length_s for part in parts.values()} == {7200.0}


@pytest.mark.parametrize("name", ["static_14b", "static_8b", "seeding", "migration", "spot", "spot_p3"])
def test_every_scenario_of_the_paper_can_be_read(name: str) -> None:
    scenario = load_paper_scenario(ROOT / "configs" / "papers" / f"rlboost_{name}.yaml")
    assert scenario.name == f"rlboost_{name}"
