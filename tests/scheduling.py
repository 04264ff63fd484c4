"""Which process of ``make test`` runs which test.

    real runs, one after the other ──▶ one process ─┐
    all other files, each as a whole ──▶ the others ─┴─▶ who is done takes what is left

Real runs have deadlines, and several processes each: two at once would be late on a machine of two cores. They take
longest, so they come first. A file stays together, for the sake of what its module makes once.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

from xdist.scheduler import LoadScopeScheduling

_REAL: Final = (
    "tests/chaos/*.py",
    "tests/benchmarks/*.py",
    "tests/benchmarks/peers/*.py",
    "tests/supervisors/faults/test_node_faults.py",
    "tests/supervisors/head/test_machine_process.py",
    "tests/supervisors/machine/test_process.py",
    "tests/supervisors/machine/test_role_processes.py",
)
"""Files whose tests start processes of ours and look at the clock."""


def is_real(file: Path) -> bool:
    return any(file.match(pattern) for pattern in _REAL)


class OneRealRunAtOnce(LoadScopeScheduling):
    """Hands files to processes, in the order of their collection, and all real runs to the same one."""

    def _split_scope(self, nodeid: str) -> str:
        file = nodeid.split("::", 1)[0]
        return "real runs" if is_real(Path(file)) else file
