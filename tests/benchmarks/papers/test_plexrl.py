"""PlexRL's published results and what was measured beside them: which come out, and that the page says so."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from actors.policies.sharing.placement_view import JobView, PlacementRules, ServiceView
from actors.policies.sharing.slices import SliceRules
from benchmarks.decisions import placement as placement_benchmark
from benchmarks.papers.claims import PaperResult, run_paper
from benchmarks.papers.cluster.shared_service import SharingJob, share
from benchmarks.papers.cluster.sharing_fleet import FleetJob, run_fleet
from benchmarks.papers.scenario import load_paper_scenario
from benchmarks.papers.setups.plexrl import MODELS, SharingStudy, SliceSetup
from benchmarks.papers.studies.plexrl_share import sharing
from tests.benchmarks.papers.pages import assert_page_shows

ROOT = Path(__file__).parents[3]
SCENARIOS = [
    pytest.param(path, id=path.stem, marks=[pytest.mark.long] if path.stem in ("plexrl_fleet", "plexrl_slices") else [])
    for path in sorted((ROOT / "configs" / "papers").glob("plexrl_*.yaml"))
]
NOT_WITHIN = {"plexrl_fleet": {"pack.completion"}}
"""Measures of claims that our model does not reproduce. One that comes to hold is taken out here and on the page."""
FIFO = SliceRules("fifo", starvation_s=100.0, gap_s=1.0)


@pytest.fixture(scope="module", params=SCENARIOS)
def result(request: pytest.FixtureRequest) -> PaperResult:
    return run_paper(load_paper_scenario(request.param))


def test_the_claims_that_hold_are_all_but_those_that_the_page_explains(result: PaperResult) -> None:
    outside = {row.claim.measure for row in result.rows if not row.within}
    assert outside == NOT_WITHIN.get(result.scenario, set())


def test_the_page_shows_every_row_as_it_comes_out(result: PaperResult) -> None:
    assert_page_shows(result, "plexrl.md")


# ------------------------------------------------------------ what the models do


def regular(rollout_s: float, burst_s: float, *, lag: int = 0, steps: int = 50) -> SharingJob:
    return SharingJob(np.full(steps, rollout_s), burst_s, switch_s=0.0, lag=lag)


def test_regular_jobs_that_take_turns_are_not_slowed_but_by_the_first_meeting() -> None:
    outcome = share([regular(7.0, 3.0), regular(7.0, 3.0)], FIFO)
    assert outcome.slowdowns == pytest.approx((1.0, 1.0), abs=0.01)
    assert outcome.busy == pytest.approx(0.6, abs=0.02)


def test_micro_batches_of_two_synchronous_jobs_that_meet_delay_the_one_that_could_have_ended() -> None:
    """Both ask at 7 s, and two are left of each after: whole bursts end at 10 and 13 s, interleaved at 12 and 13 s."""
    jobs = [regular(7.0, 3.0, steps=1), regular(7.0, 3.0, steps=1)]
    assert share(jobs, FIFO).slowdowns[0] == pytest.approx(1.0)
    assert share(jobs, FIFO, micro_batches=3).slowdowns[0] == pytest.approx(1.2)


def test_a_job_of_lag_one_trains_while_it_generates() -> None:
    assert regular(7.0, 3.0, steps=1000).alone_s() == pytest.approx(10.0)
    assert regular(7.0, 3.0, lag=1, steps=1000).alone_s() == pytest.approx(7.0, abs=0.01)


def test_the_saving_follows_the_devices_and_the_duty_and_not_the_claim(monkeypatch: pytest.MonkeyPatch) -> None:
    setup = SliceSetup(steps=300)
    few = sharing(SharingStudy(kind="plexrl_share", models=["7B"], setup=setup), 0)
    monkeypatch.setitem(MODELS, "7B", MODELS["7B"].model_copy(update={"bubble": 0.5}))
    more = sharing(SharingStudy(kind="plexrl_share", models=["7B"], jobs=3, setup=setup), 0)
    assert few["7B.bound_percent"] == pytest.approx(100 / 3)
    assert more["7B.bound_percent"] == pytest.approx(100 * 4 / 9)
    assert few["7B.slowdown"] < 1.1
    assert more["7B.slowdown"] > 1.4


def test_a_fleet_runs_one_job_after_another_where_services_are_isolated_and_side_by_side_where_not() -> None:
    jobs = [FleetJob(0.0, JobView(f"j{i}", 1, submitted=i, remaining_s=100.0)) for i in range(3)]
    service = [ServiceView("train-0", 9, 9, 3)]
    isolated = run_fleet(jobs, service, PlacementRules("isolated", cold_steps=0))
    shared = run_fleet(jobs, service, PlacementRules("pack", cold_steps=0))
    assert (isolated.makespan_s, isolated.completion_s, isolated.queued_s) == pytest.approx((300.0, 200.0, 100.0))
    assert (shared.makespan_s, shared.queued_s, shared.slowdown) == pytest.approx((100.0, 0.0, 1.0))


def test_the_benchmark_of_placement_ends_with_a_line_of_json(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(placement_benchmark, "hardware", dict[str, str])  # it would look at the load for seconds
    assert placement_benchmark.main(["--json", "--jobs", "12", "--services", "3", "--draws", "1"]) == 0
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert set(result["decisions"]) >= {"pack.filled", "spread_backfill.tight"}
    assert result["worst_ms"] == max(one["worst_ms"] for one in result["decisions"].values())
