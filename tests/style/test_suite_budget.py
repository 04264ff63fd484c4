"""``make test`` stays within twelve minutes on two cores: what is slow has a line, and the lines have a budget."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from tests.marked import marks_by_test
from tests.scheduling import group_of
from tests.slow_tests import SLOW, SLOW_S
from tests.suite_times import FAILS_TIMES, LONGER_TIMES, Spent, function_of, told

ROOT: Final = Path(__file__).resolve().parents[2]
BUDGET_S: Final = {"real runs": 1080.0, "the rest": 150.0, "cluster": 240.0}
"""For what is listed: of the two processes of ``make test`` that start real runs, of the third one, and of ``make
test-cluster``. What is not listed fills the rest of three times twelve minutes."""


def file_of(function: str) -> Path:
    return ROOT / function.partition("::")[0]


def marks_of(function: str) -> set[str] | None:
    """Marks of a function of the list; None: there is no such function."""
    file = file_of(function)
    return marks_by_test(file).get(function.partition("::")[2]) if file.exists() else None


def test_what_is_listed_exists_takes_long_and_has_a_reason() -> None:
    missing = [function for function in SLOW if marks_of(function) is None]
    assert not missing, "these are gone, or have another name: mend their lines in tests/slow_tests.py"
    assert [function for function, line in SLOW.items() if line.seconds <= SLOW_S or len(line.reason) < 10] == []
    assert list(SLOW) == sorted(SLOW), "one finds a line where it belongs"


def test_what_is_long_has_no_line() -> None:
    """The list is of what ``make test`` and ``make test-cluster`` run."""
    assert [function for function in SLOW if "long" in (marks_of(function) or ())] == []


def test_the_lines_of_what_is_slow_are_within_the_budget() -> None:
    """Who wants to add a line and finds no room makes another test faster, or ``long`` where its like stays."""
    spent = dict.fromkeys(BUDGET_S, 0.0)
    for function, line in SLOW.items():
        by_group = "real runs" if group_of(file_of(function)) else "the rest"
        spent["cluster" if "cluster" in (marks_of(function) or ()) else by_group] += line.seconds
    assert {whose: round(seconds) for whose, seconds in spent.items() if seconds > BUDGET_S[whose]} == {}


def test_a_run_tells_what_takes_long_without_a_line_and_fails_of_what_takes_very_long() -> None:
    listed, line = next(iter(SLOW.items()))
    fine = Spent(3 * SLOW_S, SLOW_S - 0.1, SLOW_S - 0.1)
    lines, failing = told({"tests/test_x.py::test_new": fine, listed: Spent(line.seconds, line.seconds)})
    assert (lines, failing) == ([], [])
    long_s = FAILS_TIMES * SLOW_S + 1.0
    lines, failing = told(
        {
            "tests/test_x.py::test_waits": Spent(long_s, long_s, 1.0),
            "tests/test_x.py::test_computes": Spent(long_s, long_s, long_s),
            "tests/test_x.py::test_waits_for_children_of_another": Spent(SLOW_S + 1.0, SLOW_S + 1.0, long_s),
            listed: Spent(LONGER_TIMES * line.seconds + 1.0, line.seconds),
        }
    )
    assert len(lines) == 4
    assert [text.split(": ")[0] for text in failing] == ["tests/test_x.py::test_computes"]


def test_cases_of_one_function_are_told_under_its_name() -> None:
    assert function_of("tests/a.py::test_b[c::d[e]]") == function_of("tests/a.py::test_b") == "tests/a.py::test_b"
