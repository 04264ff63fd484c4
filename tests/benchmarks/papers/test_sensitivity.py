"""Sensitivity studies: scaled down, what they vary and what they compare; and that their page fits the scenarios."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from benchmarks.papers.claims import run_paper
from benchmarks.papers.cluster.hybrid import Hybrid
from benchmarks.papers.cluster.lengths import (
    draw_lengths,
    estimate_lengths,
    recall_of_longest,
    sigma_of_recall,
)
from benchmarks.papers.scenario import PaperScenario, load_paper_scenario
from benchmarks.papers.setups.rlboost import HYBRID, HybridSetup
from benchmarks.papers.setups.sensitivity import (
    BandwidthSweep,
    CombinedRankerSweep,
    PoolSweep,
    PreemptionSweep,
    RankerSweep,
)
from benchmarks.papers.setups.streamrl import LengthHistogram, Ranker, Workload
from benchmarks.papers.studies.sensitivity_bandwidth import bandwidth
from benchmarks.papers.studies.sensitivity_pools import pools
from benchmarks.papers.studies.sensitivity_preemptions import preemptions
from benchmarks.papers.studies.sensitivity_ranker import combined_policy, dispatch
from benchmarks.papers.sweep import Panel, Sweep, sweep_from
from supervisors.cli.app import app

ROOT = Path(__file__).parents[3]
SCENARIOS = sorted((ROOT / "configs" / "papers").glob("sensitivity_*.yaml"))
SMALL = Workload(iterations=4)
QUICK = HybridSetup(prompts=16, steps=4)

# ------------------------------------------------------------ rankers of a given quality


@pytest.mark.parametrize("recall", [1.0, 0.9, 0.7, 0.5])
def test_a_ranker_is_made_as_noisy_as_its_recall_says(recall: float) -> None:
    rng = np.random.default_rng(1)
    lengths = draw_lengths(LengthHistogram(), 20_000, rng)
    ranker = Ranker(sigma=sigma_of_recall(lengths, recall, 0.2, np.random.default_rng(2)), knows="order")
    found = recall_of_longest(lengths, estimate_lengths(lengths, ranker, rng), 0.2)
    assert found == pytest.approx(recall, abs=0.02)


def test_no_noise_is_as_good_as_chance_at_most() -> None:
    with pytest.raises(ValueError, match=r"chance finds 0\.2; ask for more"):
        sigma_of_recall(np.arange(1, 100), 0.2, 0.2, np.random.default_rng(0))


def test_what_a_ranker_knows_is_all_that_its_estimates_show() -> None:
    """Of the order: the batch's own lengths. By chance: the same, and a fifth of the longest. Nothing: one number."""
    rng = np.random.default_rng(3)
    lengths = draw_lengths(LengthHistogram(), 5000, rng)
    chance, nothing = (estimate_lengths(lengths, r, rng) for r in (Ranker(by_chance=True), Ranker(knows="nothing")))
    ordered = estimate_lengths(lengths, Ranker(sigma=0.5, knows="order"), rng)
    assert sorted(chance) == sorted(lengths)
    assert recall_of_longest(lengths, chance, 0.2) == pytest.approx(0.2, abs=0.03)
    assert np.quantile(ordered, [0.1, 0.5, 0.9]) == pytest.approx(np.quantile(lengths, [0.1, 0.5, 0.9]), rel=0.01)
    assert set(nothing) == {lengths.mean()}


# ------------------------------------------------------------ the studies, scaled down


def test_dispatch_in_hindsight_keeps_its_gain_with_an_oracle_and_loses_nothing_by_chance() -> None:
    """The closed form and estimates at their word lose by chance: that is what hindsight is for."""
    study = RankerSweep(kind="sensitivity_ranker", models=["32B"], recalls=[1.0], draws=2, workload=SMALL)
    measures = dispatch(study, 0).measures()
    assert measures["32B.async.1"] > 1.1
    assert measures["32B.async.chance"] > 0.97
    assert measures["32B.async_at_its_word.chance"] < 0.95
    assert measures["32B.async_closed_form.chance"] < 0.95


def test_the_combined_policy_is_compared_with_itself_without_ranking() -> None:
    study = CombinedRankerSweep(
        kind="sensitivity_ranker_combined", models=["7B"], variant="5K", hybrid=["8B"], workers=2, recalls=[1.0],
        draws=1, hybrid_draws=1, workload=Workload(samples=48, iterations=6), setup=QUICK,
    )  # fmt: skip
    measures = combined_policy(study, 0).measures()
    assert {f"{at}.combined.{point}" for at in ("streamrl.7B", "rlboost.8B") for point in ("1", "chance", "least")} == {
        *measures
    }
    assert all(0.8 < ratio < 2.5 for ratio in measures.values())


def test_slower_links_cost_those_that_wait_for_weights_and_not_those_that_overlap_them() -> None:
    study = BandwidthSweep(
        kind="sensitivity_bandwidth", slower=[1, 10], models=["72B"], hybrid=["8B"], workers=2, draws=1,
        workload=Workload(samples=128, iterations=6), setup=QUICK,
    )  # fmt: skip
    measures = bandwidth(study, 0).measures()
    lost = {
        name: measures[f"streamrl.72B.{name}.÷1"] / measures[f"streamrl.72B.{name}.÷10"] - 1
        for name in ("sync", "one_step_barrier", "async")
    }
    assert min(lost["sync"], lost["one_step_barrier"]) > 0.03
    assert lost["async"] < lost["sync"] / 2
    assert {"rlboost.8B.rlboost.÷10", "rlboost.8B.combined.÷10"} <= measures.keys()


def test_a_pull_takes_as_long_as_the_slower_of_the_two_links_says() -> None:
    def pull_s(pulling: int, **links: float) -> float:
        setup = HybridSetup().model_copy(update={"load_s": 0.0} | links)
        return Hybrid(HYBRID["8B"], setup).pull_s(pulling)

    assert pull_s(1, remote_network_bytes_s=6.25e8) == pytest.approx(10 * pull_s(1))
    assert pull_s(1, reserved_network_bytes_s=25e9 / 4) == pytest.approx(pull_s(1))
    assert pull_s(8, reserved_network_bytes_s=2.5e9) == pytest.approx(10 * pull_s(8))


def test_preemptions_are_multiplied_and_machines_are_not() -> None:
    study = PreemptionSweep(
        kind="sensitivity_preemptions", times=[1, 5], models=["8B"], segment_s=900, setup=HybridSetup(prompts=16)
    )
    measures = preemptions(study, 0).measures()
    for part in "ABC":
        assert measures[f"{part}.preemptions.×5"] > 2 * measures[f"{part}.preemptions.×1"]
        assert measures[f"{part}.nodes_mean.×5"] == pytest.approx(measures[f"{part}.nodes_mean.×1"])
    assert measures["8B.migrate.×5"] > 1.0
    assert {"8B.recompute.least", "8B.combined.least", "8B.migrate_over_recompute.least"} <= measures.keys()


def test_a_mixed_pool_gains_by_the_workers_own_latencies_and_a_pool_of_one_kind_has_nothing_to_gain() -> None:
    study = PoolSweep(
        kind="sensitivity_pools", models=["72B"], shares=[0.0, 0.5, 1.0], draws=1, workload=Workload(iterations=2)
    )
    measures = pools(study, 0).measures()
    assert measures["72B.own_tables.50"] > 1.03 * measures["72B.all_alike.50"]
    for end in ("0", "100"):
        assert measures[f"72B.own_tables.{end}"] == measures[f"72B.all_alike.{end}"]


# ------------------------------------------------------------ what comes out


def test_a_sweep_is_measured_by_its_means_and_written_whole() -> None:
    sweep = Sweep(
        "x in m", ["1", "2"], [Panel("p", "P", "plain", {"a": np.array([[1.0, 2.0], [0.5, 0.7]])})], {"b": 3.0}
    )
    assert sweep.measures() == {"p.a.1": 1.5, "p.a.2": 0.6, "p.a.least": 0.6, "b": 3.0}
    again = sweep_from(json.loads(json.dumps(sweep.as_map())))
    assert again.as_map() == sweep.as_map()


def test_simulate_writes_a_result_that_plot_draws(tmp_path: Path) -> None:
    scenario = load_paper_scenario(ROOT / "configs" / "papers" / "sensitivity_ranker.yaml").model_dump(mode="json")
    scenario["study"] |= {"models": ["7B"], "variant": "5K", "recalls": [0.8], "draws": 1}
    scenario["study"]["workload"] |= {"samples": 64, "iterations": 3}
    scenario["claims"] = [claim for claim in scenario["claims"] if claim["measure"].startswith("7B")]
    file = tmp_path / "small.yaml"
    file.write_text(json.dumps(scenario), encoding="utf-8")
    ran = CliRunner().invoke(app, ["simulate", str(file), "--out", str(tmp_path / "out"), "--json"])
    assert ran.exit_code == 0, ran.output
    drawn = CliRunner().invoke(app, ["plot", str(tmp_path / "out"), "--json"])
    assert drawn.exit_code == 0, drawn.output
    said = json.loads(drawn.stdout.splitlines()[-1])
    assert [Path(picture).name for picture in said["pictures"]] == ["curves.png"]
    assert "data:image/png;base64" in Path(said["page"]).read_text(encoding="utf-8")


def test_only_a_study_has_a_result_to_write(tmp_path: Path) -> None:
    ran = CliRunner().invoke(app, ["simulate", str(ROOT / "configs" / "chaos.yaml"), "--out", str(tmp_path)])
    assert (ran.exit_code, "--out: is for studies" in ran.stderr) == (2, True), ran.stderr


# ------------------------------------------------------------ scenarios and their page


@pytest.mark.parametrize("path", SCENARIOS, ids=lambda path: path.stem)
def test_the_page_has_every_claim_of_a_scenario_with_a_number_that_fits_its_verdict(path: Path) -> None:
    """The scenarios take minutes, so their numbers are not computed anew here."""
    scenario = load_paper_scenario(path)
    page = (ROOT / "docs" / "papers" / "sensitivity.md").read_text(encoding="utf-8")
    section = page.partition(f"`{scenario.name}`")[2].partition("\n## ")[0]
    for claim in scenario.claims:
        cells = re.search(rf"^\| {re.escape(claim.claim)} \|(.*)\|$", section, re.MULTILINE)
        assert cells is not None, claim.claim
        goal, ours, verdict = (cell.strip() for cell in cells[1].split("|"))
        assert goal == f"≥ {claim.band[0]:g}"
        assert verdict == ("yes" if claim.within(float(ours)) else "no"), claim.claim
    assert len(re.findall(r"^\| .* \| ≥ ", section, re.MULTILINE)) == len(scenario.claims), "no row of another scenario"


@pytest.mark.long
@pytest.mark.parametrize("path", SCENARIOS, ids=lambda path: path.stem)
def test_claims_of_a_scenario_are_about_measures_that_its_study_has(path: Path) -> None:
    """Of the sections and names; with one draw of a small workload."""
    scenario = load_paper_scenario(path)
    shrunk = scenario.model_dump(mode="json")
    study = shrunk["study"]
    for key, small in {
        "draws": 1,
        "hybrid_draws": 1,
        "recalls": [0.9],
        "slower": [1],
        "times": [1],
        "segment_s": 600,
    }.items():
        if key in study:
            study[key] = small
    for key, small in {"workload": {"samples": 16, "iterations": 6}, "setup": {"prompts": 4, "steps": 3}}.items():
        if key in study:
            study[key] |= small
    result = run_paper(PaperScenario.model_validate(shrunk))
    assert len(result.rows) == len(scenario.claims)
    assert result.sweep is not None
