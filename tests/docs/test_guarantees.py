"""Each promise of docs/guarantees.md is proved by what ``make test`` runs, whatever else proves it at length."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final

import pytest

from tests.marked import marks_by_test

ROOT: Final = Path(__file__).parents[2]
ELSEWHERE: Final = {"long", "cluster"}
"""Marks of what ``make test`` leaves out."""


def promises() -> list[str]:
    lines = (ROOT / "docs" / "guarantees.md").read_text(encoding="utf-8").splitlines()
    return [line for line in lines if "`tests/" in line]


def is_in_make_test(proof: str) -> bool:
    """Of a file, whether any of its tests is; one of stateful tests alone has no functions."""
    file, _, name = proof.partition("::")
    marks = marks_by_test(ROOT / file)
    return any(not ELSEWHERE & marks[test] for test in marks if test == name or not name) or not (marks or name)


@pytest.mark.parametrize("promise", promises(), ids=lambda line: line.split("|")[1].strip()[:60])
def test_a_promise_has_a_proof_that_make_test_runs(promise: str) -> None:
    proofs = re.findall(r"`(tests/[^`]+)`", promise)
    assert any(map(is_in_make_test, proofs)), f"of {proofs} all are left out: name a short one too"
