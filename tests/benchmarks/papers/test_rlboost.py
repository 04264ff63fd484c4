"""The cluster on which RLBoost is simulated: what it must conserve, and that its policies are the live ones."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.papers.cluster.hybrid import HybridCluster, Options
from benchmarks.papers.cluster.moving_engine import MovingEngine, Sample
from benchmarks.papers.scenario import load_paper_scenario
from benchmarks.papers.setups.rlboost import HYBRID, HybridSetup
from benchmarks.papers.studies.rlboost import ROOT, segments
from supervisors.providers.trace_generator import Market, generate
from supervisors.providers.traces import TraceEvent

SMALL = HybridSetup(prompts=12)
MODEL = HYBRID["8B"]


def engine(places: int = 4) -> MovingEngine:
    cluster = HybridCluster(MODEL, HybridSetup(places=places), Options())
    return cluster.local[0]


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
    cluster = HybridCluster(MODEL, SMALL, Options(keep_tokens=keep, seeding=seeding), events, seed)
    cluster.place_now(workers)
    for _ in range(3):
        samples = cluster.draw()
        done = cluster.step(samples)
        assert all(math.isfinite(s.finished_s) and s.kept == s.length for s in samples)
        assert done.seconds > cluster.train_s(samples), "nothing is trained before it is there"
        assert done.tokens == sum(s.prompt_tokens + s.length for s in samples)
        assert done.cost >= done.seconds * SMALL.reserved_price / 3600 * 0.999


def test_more_workers_never_cost_throughput_and_none_gives_what_colocation_gives() -> None:
    rates: list[float] = []
    for workers in (0, 2, 5):
        cluster = HybridCluster(MODEL, HybridSetup(), Options(target=workers), seed=1)
        cluster.place_now(workers)
        steps = [cluster.step(cluster.draw()) for _ in range(6)][2:]
        rates.append(sum(s.tokens for s in steps) / sum(s.seconds for s in steps))
    assert rates[0] < rates[1] < rates[2]
    alone = HybridCluster(MODEL, HybridSetup(), Options(), seed=1)
    samples = [alone.draw() for _ in range(6)][2:]
    colocated = sum(s.prompt_tokens + s.length for b in samples for s in b) / sum(map(alone.colocated_step_s, samples))
    assert rates[0] == pytest.approx(colocated, rel=0.1)


def test_a_step_that_loses_all_its_workers_after_the_window_is_finished_by_the_reserved_machines() -> None:
    cluster = HybridCluster(MODEL, SMALL, Options(fixed_seed_s=20.0), seed=3)
    cluster.place_now(2)
    cluster.expect([TraceEvent(60.0, f"fixed-{i}", "kill") for i in range(2)])
    done = cluster.step(cluster.draw())
    assert done.remote_next == 0
    assert math.isfinite(done.seconds)


def test_parts_of_a_trace_are_chosen_by_their_machines_alone() -> None:
    study = load_paper_scenario(ROOT / "configs" / "papers" / "rlboost_spot.yaml").study
    assert study.kind == "rlboost_spot"
    from supervisors.providers.trace_files import read_trace

    parts = segments(read_trace(ROOT / study.trace), 7200.0)
    assert parts["A"].nodes_mean > parts["C"].nodes_mean > parts["B"].nodes_mean
    assert {part.length_s for part in parts.values()} == {7200.0}


@pytest.mark.parametrize("name", ["static_14b", "static_8b", "seeding", "migration", "spot", "spot_p3"])
def test_every_scenario_of_the_paper_can_be_read(name: str) -> None:
    scenario = load_paper_scenario(ROOT / "configs" / "papers" / f"rlboost_{name}.yaml")
    assert scenario.name == f"rlboost_{name}"
