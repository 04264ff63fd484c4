"""Engine and trainer agree on every family that the documentation lists, or the family is refused in a sentence."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.gpu._model_family import measure_family
from benchmarks.gpu.model_families import APART_MAX, FAMILIES, main, markdown

QUICK = ("opt", "gemma2", "granitemoe", "mamba")
"""One with learned positions and layer drop, one with windows, one with experts, one without a cache of keys."""
PAGE = Path(__file__).resolve().parents[2] / "docs" / "reference" / "models.md"


@pytest.mark.parametrize(
    "family", [pytest.param(name, marks=[] if name in QUICK else [pytest.mark.long]) for name in FAMILIES]
)
def test_the_sampled_policy_is_the_trained_policy(tmp_path: Path, family: str) -> None:
    found = measure_family(family, FAMILIES[family], tmp_path)
    assert found.worst <= APART_MAX
    assert found.refused or found.plain > 0


def test_a_family_without_a_cache_of_keys_is_refused_by_the_engine(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["--only", "rwkv", "--json", "--check"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert "RwkvForCausalLM" in result["families"]["rwkv"]["refused"] and result["missed"] == []
    assert "| `rwkv` | – | – | RwkvForCausalLM" in markdown(result)


def test_the_page_lists_every_family_with_a_figure_within_the_bound() -> None:
    rows = [line.split(" | ") for line in PAGE.read_text("utf-8").splitlines() if line.startswith("| `")]
    assert {row[0].strip("| `") for row in rows} == set(FAMILIES)
    figures = [float(cell) for row in rows for cell in row[1:3] if cell != "–"]
    assert len(figures) >= 2 * 40 and max(figures) <= APART_MAX
