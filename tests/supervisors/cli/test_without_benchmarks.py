"""An installation without the repository's benchmarks/ runs all but studies of papers, and says where those are."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from supervisors.cli import bench
from supervisors.cli.app import app

CONFIGS = Path(__file__).parents[3] / "configs"


@pytest.fixture(autouse=True)
def without(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(bench, "_FOLDER", tmp_path / "benchmarks")


def test_a_study_is_refused_and_its_result_is_not_drawn(tmp_path: Path) -> None:
    study = str(CONFIGS / "papers" / "streamrl_lengths.yaml")
    (tmp_path / "result.json").write_text("{}")
    for arguments in (["simulate", study], ["plot", str(tmp_path)]):
        result = CliRunner().invoke(app, arguments)
        assert result.exit_code == 2
        assert "is a study of a paper" in result.stderr
        assert "Run it in a clone of the repository" in result.stderr


def test_a_benchmark_is_refused_and_a_scenario_runs(tmp_path: Path) -> None:
    (tmp_path / "benchmarks").mkdir()
    (tmp_path / "benchmarks" / "loop.py").write_text("raise SystemExit('of somebody else')")
    for arguments in (["bench", "loop"], ["bench"]):
        result = CliRunner().invoke(app, arguments)
        assert (result.exit_code, "clone the repository" in result.stderr) == (2, True)
    scenario = tmp_path / "scenario.yaml"
    scenario.write_text("name: s\njobs: [{name: j, mode: sync, steps: 1}]\n")
    result = CliRunner().invoke(app, ["simulate", str(scenario)])
    assert result.exit_code == 0, result.output
