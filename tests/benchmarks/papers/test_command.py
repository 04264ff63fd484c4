"""What the command line calls of the studies: a claim's table or JSON, a result that is written, and its picture."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.papers.command import draw_result, holds_result, is_paper_scenario, simulate_paper
from benchmarks.papers.result_data import read_result
from benchmarks.papers.sweep import Panel, Sweep
from benchmarks.papers.sweep_figures import curves
from configs.errors import ConfigError

CONFIGS = Path(__file__).parents[3] / "configs"
LENGTHS = CONFIGS / "papers" / "streamrl_lengths.yaml"


def test_a_study_is_told_from_jobs_and_faults() -> None:
    assert is_paper_scenario(LENGTHS)
    assert not is_paper_scenario(CONFIGS / "chaos.yaml")


def test_a_study_prints_its_claims_and_writes_them(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out"
    assert not holds_result(out)
    assert simulate_paper(LENGTHS, None, None, json_=False) == 0
    assert "claims within tolerance" in capsys.readouterr().out
    assert simulate_paper(LENGTHS, 1, out, json_=True) == 0
    said = json.loads(capsys.readouterr().out)
    assert holds_result(out)
    written = json.loads((out / "result.json").read_text(encoding="utf-8"))
    assert {key: written[key] for key in said} == said
    with pytest.raises(ConfigError, match="Name a directory that can be"):
        simulate_paper(LENGTHS, None, out / "result.json", json_=True)


def test_a_result_becomes_a_picture_and_a_page_that_stands_alone(tmp_path: Path) -> None:
    pictures = draw_result(result_dir(tmp_path / "r"), tmp_path / "plots")
    assert [path.name for path in pictures] == ["curves.png"]
    page = (tmp_path / "plots" / "index.html").read_text(encoding="utf-8")
    assert "1 of 2" in page
    assert "data:image/png;base64" in page


def result_dir(folder: Path, **changes: object) -> Path:
    panels = [
        {"key": key, "title": f"model {key}", "over": over, "ratios": {"sync": [[1.1, 1.3], [0.9, 0.9]]}}
        for key, over in (("a", "plain"), ("b", "plain"), ("c", "something else"))
    ]
    sweep = {"parameter": "recall", "points": ["1", "chance"], "panels": panels}
    folder.mkdir()
    result = {"scenario": "s", "claims": [{"within": True}, {"within": False}], "sweep": sweep} | changes
    (folder / "result.json").write_text(json.dumps(result))
    return folder


def test_curves_are_means_of_the_draws_over_a_baseline_at_one_a_row_for_each_baseline(tmp_path: Path) -> None:
    data = read_result(result_dir(tmp_path / "r"))
    assert (data.within, data.claims) == (1, 2)
    figure = curves(data.sweep)
    shown = [axes for axes in figure.axes if axes.get_visible()]
    assert [axes.get_title(loc="left") for axes in shown] == ["model a", "model b", "model c"]
    assert [axes.get_ylabel() for axes in shown] == ["throughput over\nplain", "", "throughput over\nsomething else"]
    line, baseline = shown[0].get_lines()
    assert line.get_ydata().tolist() == pytest.approx([1.2, 0.9])
    assert list(baseline.get_ydata()) == [1.0, 1.0]
    assert [label.get_text() for label in shown[0].get_xticklabels()] == ["1", "chance"]
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["sync", "plain baseline"]


@pytest.mark.parametrize(
    ("changes", "said"),
    [({"sweep": None}, "has no curves: its study varies nothing"), ({"claims": 3}, "is no result of a study")],
)
def test_a_result_that_cannot_be_drawn_is_told_with_what_to_do(
    tmp_path: Path, changes: dict[str, Any], said: str
) -> None:
    with pytest.raises(ConfigError, match=said):
        draw_result(result_dir(tmp_path / "r", **changes), tmp_path / "plots")


def test_more_than_three_panels_take_another_row() -> None:
    panels = [Panel(f"{i}", f"a rather long title {i}", "plain", {"sync": np.ones((2, 1))}) for i in range(5)]
    figure = curves(Sweep("recall", ["1", "chance"], panels))
    shown = [axes.get_subplotspec() for axes in figure.axes if axes.get_visible()]
    places = [(spec.rowspan.start, spec.colspan.start) for spec in shown if spec is not None]
    assert places == [(0, 0), (0, 1), (0, 2), (1, 0), (1, 1)]
