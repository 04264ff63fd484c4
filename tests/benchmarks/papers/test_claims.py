"""Scenario files of published results: claims beside what came out, and what is said about wrong files."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from benchmarks.papers.claims import run_paper, table
from benchmarks.papers.scenario import Claim, PaperScenario, is_paper_scenario, load_paper_scenario
from benchmarks.papers.studies.registry import STUDIES
from configs.errors import ConfigError
from supervisors.cli.app import app

CONFIGS = Path(__file__).parents[3] / "configs"
PAPERS = sorted((CONFIGS / "papers").glob("*.yaml"))
RANKER = CONFIGS / "papers" / "streamrl_ranker.yaml"


def claim(**changes: object) -> Claim:
    return Claim.model_validate(
        {"claim": "c", "source": "Fig. 0", "measure": "m", "published": 2.0, "tolerance": 0.1} | changes
    )


@pytest.mark.parametrize(
    ("changes", "agrees", "differs"),
    [
        ({}, [1.8, 2.0, 2.2], [1.79, 2.21]),
        ({"tolerance": 2, "tolerance_is": "absolute"}, [0.0, 4.0], [-0.1, 4.1]),
        ({"published": [1.0, 2.0]}, [0.9, 1.5, 2.2], [0.89, 2.21]),
        ({"published": -2.0}, [-1.8, -2.2], [-1.79, -2.21]),
        ({"holds": "at_least"}, [1.8, 9.0], [1.79]),
        ({"holds": "at_most"}, [2.2, -9.0], [2.21]),
    ],
)
def test_a_claim_agrees_within_its_tolerance_and_not_beyond(
    changes: dict[str, object], agrees: list[float], differs: list[float]
) -> None:
    one = claim(**changes)
    assert [value for value in agrees if not one.within(value)] == []
    assert [value for value in differs if one.within(value)] == []


@pytest.mark.parametrize("path", PAPERS, ids=lambda path: path.stem)
def test_every_scenario_of_a_paper_loads_is_named_as_its_file_and_has_a_study_that_runs(path: Path) -> None:
    scenario = load_paper_scenario(path)
    assert scenario.name == path.stem
    assert scenario.study.kind in STUDIES
    assert is_paper_scenario(path)
    assert not is_paper_scenario(CONFIGS / "chaos.yaml")


def test_the_last_line_of_json_has_a_row_for_each_claim_with_ours_from_the_run() -> None:
    """Another seed draws other samples, so ours differs while published stays; claims not within are no error."""
    first, second = (
        CliRunner().invoke(app, ["simulate", str(RANKER), "--json", "--seed", seed]) for seed in ("0", "1")
    )
    assert (first.exit_code, second.exit_code) == (0, 0)
    result, other = (json.loads(run.stdout.splitlines()[-1]) for run in (first, second))
    assert set(result) == {"scenario", "claims", "seconds"}
    assert {"claim", "source", "published", "ours", "tolerance", "within"} <= set(result["claims"][0])
    assert [row["published"] for row in result["claims"]] == [row["published"] for row in other["claims"]]
    assert [row["ours"] for row in result["claims"]] != [row["ours"] for row in other["claims"]]


def test_the_table_marks_what_is_not_within() -> None:
    scenario = load_paper_scenario(RANKER)
    wrong = scenario.claims[0].model_copy(update={"published": 0.2})
    shown = table(run_paper(scenario.model_copy(update={"claims": [scenario.claims[0], wrong]})))
    assert [line.rsplit(maxsplit=1)[-1] for line in shown.splitlines()[2:4]] == ["yes", "NO"]
    assert "1 of 2 claims within tolerance" in shown


def test_a_measure_that_the_study_does_not_have_is_told_with_those_it_has() -> None:
    scenario = load_paper_scenario(RANKER)
    odd = PaperScenario.model_validate(scenario.model_dump() | {"claims": [claim(measure="speed").model_dump()]})
    with pytest.raises(ConfigError, match=r"no measure 'speed'. Name one of: recall_10, recall_20, recall_5"):
        run_paper(odd)


@pytest.mark.parametrize(
    ("study", "said"),
    [
        ("{kind: streamrl_rankr}", 'x.yaml:3: study.kind: "streamrl_rankr" is not one of'),
        ("{kind: streamrl_ranker, sampels: 3}", "x.yaml:3: study.sampels: there is no such key. Did you mean"),
        ("{kind: streamrl_ranker, ranker: {sigma: -1}}", "x.yaml:3: study.ranker.sigma: -1 is not allowed"),
    ],
)
def test_a_wrong_study_is_told_with_line_field_and_fix(tmp_path: Path, study: str, said: str) -> None:
    file = tmp_path / "x.yaml"
    file.write_text(
        f"name: x\npaper: none\nstudy: {study}\nclaims:\n"
        "  - {claim: a, source: b, measure: c, published: 1, tolerance: 0.1}\n"
    )
    result = CliRunner().invoke(app, ["simulate", str(file)])
    assert (result.exit_code, said in result.stderr) == (2, True), result.stderr


def test_a_study_takes_neither_many_seeds_nor_a_log() -> None:
    for options in (["--seeds", "0..3"], ["--log"], ["--processes", "2"]):
        result = CliRunner().invoke(app, ["simulate", str(RANKER), *options])
        assert (result.exit_code, "Give --seed, --json and --out only" in result.stderr) == (2, True)
