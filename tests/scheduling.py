"""Which process of ``make test`` runs which test.

    real runs, in two chains of about equal length ─▶ one process each ┐
                                                                        ├▶ what is left
    all other files, each as a whole ─────────────────▶ the third ─────┘

Real runs take longest and so come first. They have several processes each and deadlines, and wait much: two of them and
a process of other tests keep two cores busy, more would be late on them. A file stays together, for the sake of what
its module makes once.
"""

from __future__ import annotations

from collections import defaultdict
from functools import cache
from pathlib import Path
from typing import Final

from xdist.scheduler import LoadScopeScheduling

from tests.slow_tests import SLOW

CHAINS: Final = 2
_RUNS: Final = (
    "tests/chaos/*.py",
    "tests/hosts/*.py",
    "tests/benchmarks/*_end_to_end.py",
    "tests/supervisors/faults/test_node_faults.py",
    "tests/supervisors/head/test_machine_process.py",
    "tests/supervisors/machine/processes/test_process.py",
    "tests/supervisors/machine/test_role_processes.py",
    "tests/supervisors/serving/test_serve.py",
)
"""Files whose tests start processes of ours and look at the clock."""


@cache
def chains() -> dict[str, int]:
    """The chain of each file of real runs that is slow: the longest first, each to the chain that is shorter so far."""
    seconds = defaultdict[str, float](float)
    for function, line in SLOW.items():
        file = function.partition("::")[0]
        if is_of_runs(Path(file)):
            seconds[file] += line.seconds
    lengths, placed = [0.0] * CHAINS, dict[str, int]()
    for file, length in sorted(seconds.items(), key=lambda item: -item[1]):
        placed[file] = lengths.index(min(lengths))
        lengths[placed[file]] += length
    return placed


def is_of_runs(file: Path) -> bool:
    return any(map(file.match, _RUNS))


def group_of(file: Path) -> str:
    """The files that ``file`` has to be run together with; empty: it stands alone."""
    if not is_of_runs(file):
        return ""
    placed = (chain for name, chain in chains().items() if file.as_posix().endswith(name))
    return f"real runs {next(placed, 0) + 1}"


def turn(file: Path) -> tuple[bool, str]:
    """Files with a lesser one are begun earlier."""
    group = group_of(file)
    return not group, group


class GroupScheduling(LoadScopeScheduling):
    """Hands out groups and single files, in the order of their collection."""

    def _split_scope(self, nodeid: str) -> str:
        file = nodeid.split("::", 1)[0]
        return group_of(Path(file)) or file
