"""Tells at the end of a run which tests took long and have no line in ``slow_tests.py``.

    each process:  a test ends ─▶ its seconds and processor seconds in its report
    the one that reports:  ─▶ all cases of a function ─▶ what is too long, or short by now: lines of the summary

Machines differ, so a line is all that comes of most of it. A run fails only of a case without a line that took
``FAILS_TIMES`` times what needs none, by the clock and in processor time: a busy machine does not bring that about, nor
do children of an earlier case, whose processor time counts for the case in which they are waited for.
"""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Generator, Mapping
from dataclasses import dataclass
from typing import Final

import pytest

from tests.slow_tests import SLOW, SLOW_S

FAILS_TIMES: Final = 6
SHORT_S: Final = SLOW_S / 2
"""A listed test that takes less needs no line any more."""
LONGER_TIMES: Final = 2
"""So many times the figure of its line, and it is told."""
_COMPILED: Final = {"vllm", "gpu"}
"""Marks of what takes minutes where it is run for the first time: no run fails of it."""
_PROPERTY: Final = "processor_s"
_BEGAN: Final = pytest.StashKey[float]()


def processor_s() -> float:
    """Of this process and of those that it has waited for."""
    return sum(os.times()[:4])


@dataclass
class Spent:
    """What the cases of one test function took, with what their fixtures made."""

    wall_s: float = 0.0
    """Seconds of all cases."""
    longest_s: float = 0.0
    """Seconds of the longest case."""
    processor_s: float = 0.0
    """Processor seconds of the case that took most of them."""


def function_of(nodeid: str) -> str:
    return nodeid.partition("[")[0]


def told(spent: Mapping[str, Spent]) -> tuple[list[str], list[str]]:
    """Lines for a person, and those of them for which the run fails."""
    lines: list[str] = []
    failing: list[str] = []
    for function, seconds in sorted(spent.items(), key=lambda item: -item[1].wall_s):
        took = f"{function}: {seconds.wall_s:.1f} s, its longest case {seconds.longest_s:.1f} s"
        line = SLOW.get(function)
        if line is None and seconds.longest_s > SLOW_S:
            lines.append(f"{took}; make it shorter, or give it a line with its reason in tests/slow_tests.py")
            if min(seconds.longest_s, seconds.processor_s) > FAILS_TIMES * SLOW_S:
                failing.append(lines[-1])
        elif line is not None and seconds.wall_s > LONGER_TIMES * line.seconds:
            lines.append(f"{took}; its line in tests/slow_tests.py says {line.seconds:g}")
        elif line is not None and seconds.longest_s < SHORT_S:
            lines.append(f"{took}; it needs no line in tests/slow_tests.py any more")
    return lines, failing


class SuiteTimes:
    """Plugin of every process of a run; the one without ``workerinput`` tells."""

    def __init__(self, *, tells: bool) -> None:
        self._tells = tells
        self._spent: defaultdict[str, Spent] = defaultdict(Spent)
        self._under_way = dict[str, float]()
        """Seconds so far of each case."""

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, object, object]:
        item.stash[_BEGAN] = processor_s()
        return (yield)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(
        self, item: pytest.Item, call: pytest.CallInfo[None]
    ) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        report = yield
        if call.when == "teardown":
            report.user_properties.append((_PROPERTY, round(processor_s() - item.stash[_BEGAN], 2)))
        return report

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if not self._tells or "long" in report.keywords:
            return
        self._under_way[report.nodeid] = self._under_way.get(report.nodeid, 0.0) + report.duration
        if report.when == "teardown":
            spent, took_s = self._spent[function_of(report.nodeid)], self._under_way.pop(report.nodeid)
            spent.wall_s += took_s
            spent.longest_s = max(spent.longest_s, took_s)
            if not _COMPILED & report.keywords.keys():
                computed = (float(str(value)) for name, value in report.user_properties if name == _PROPERTY)
                spent.processor_s = max([spent.processor_s, *computed])

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if self._tells and told(self._spent)[1] and session.exitstatus == pytest.ExitCode.OK:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        lines, failing = told(self._spent)
        if lines:
            terminalreporter.section("tests that take long", sep="-")
        for line in lines:
            terminalreporter.write_line(line)
        if failing:
            names = ", ".join(line.partition(": ")[0] for line in failing)
            wrong = f"these took {FAILS_TIMES * SLOW_S:g} s of a processor without a line"
            terminalreporter.write_line(f"FAILED the run: {wrong}: {names}")
