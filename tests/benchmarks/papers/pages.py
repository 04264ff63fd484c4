"""What a page of docs/papers says of a scenario, beside what comes out of it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from benchmarks.papers.claims import PaperResult

ROOT = Path(__file__).parents[3]


def assert_page_shows(result: PaperResult, page: str) -> None:
    """The published number, or both edges of a band, ours to three digits, and the verdict, of every claim."""
    text = (ROOT / "docs" / "papers" / page).read_text(encoding="utf-8")
    section = text.partition(f"`{result.scenario}`\n")[2].partition("\n## ")[0]
    for row in result.rows:
        cells = re.search(rf"^\| {re.escape(row.claim.claim)} \|(.*)\|$", section, re.MULTILINE)
        assert cells is not None, row.claim.claim
        published, ours, verdict = (cell.strip() for cell in cells[1].split("|"))
        edges = sorted({*row.claim.band})
        assert [float(number) for number in re.findall(r"[\d.]+", published)] == edges
        assert float(ours) == pytest.approx(row.ours, rel=2e-3), row.claim.claim
        assert verdict == ("yes" if row.within else "no")
