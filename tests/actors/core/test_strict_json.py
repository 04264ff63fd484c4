"""JSON that every parser reads, whatever the numbers are."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any, NoReturn

import pytest

from actors.core.strict_json import strict_json

ROOT = Path(__file__).parents[3]


def refuse(constant: str) -> NoReturn:
    raise AssertionError(f"{constant} is no JSON")


@pytest.mark.parametrize(
    ("value", "read"),
    [
        ({"a": 1.5, "b": [1, "x", None, True]}, {"a": 1.5, "b": [1, "x", None, True]}),
        (
            {"reward": math.inf, "rows": [{"loss": math.nan}, -math.inf]},
            {"reward": None, "rows": [{"loss": None}, None]},
        ),
        ((math.nan, {"deep": ({"er": [math.inf]},)}), [None, {"deep": [{"er": [None]}]}]),
        (1e308, 1e308),
    ],
)
def test_numbers_that_are_not_finite_become_null(value: Any, read: Any) -> None:
    assert json.loads(strict_json(value), parse_constant=refuse) == read


def test_the_form_of_the_text_can_be_chosen() -> None:
    assert strict_json({"a": math.nan, "b": Path("x")}, separators=(",", ":"), default=str) == '{"a":null,"b":"x"}'


def test_no_command_prints_json_that_might_hold_infinity() -> None:
    """``json.dumps`` writes NaN and Infinity, which other parsers refuse."""
    prints = re.compile(r"print\(\s*json\.dumps\(")
    rooms = [ROOT / "supervisors", ROOT / "actors", *ROOT.glob("benchmarks/*.py")]
    files = [file for room in rooms for file in ([room] if room.is_file() else sorted(room.rglob("*.py")))]
    assert [str(file.relative_to(ROOT)) for file in files if prints.search(file.read_text("utf-8"))] == []
