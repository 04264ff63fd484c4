"""Which process of ``make test`` runs which test.

    chaos: real runs that are harmed, one after the other ───────────────────────▶ one process
    all other files, each as a whole ─▶ benchmarks and children, one by one ─────▶ another, or several

Chaos takes longest and so comes first. Its runs have several processes each and deadlines: two of them at once would be
late on two cores. By the time the benchmarks' begin, nothing else runs beside it. A file stays together, for the sake
of what its module makes once.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

from xdist.scheduler import LoadScopeScheduling

_TOGETHER: Final = {
    "chaos": ("tests/chaos/*.py", "tests/hosts/*.py"),
    "processes": (
        "tests/benchmarks/*.py",
        "tests/benchmarks/peers/*.py",
        "tests/supervisors/faults/test_node_faults.py",
        "tests/supervisors/head/test_machine_process.py",
        "tests/supervisors/machine/test_process.py",
        "tests/supervisors/machine/test_role_processes.py",
    ),
}
"""Files whose tests start processes of ours and look at the clock."""
_ORDER: Final = ("chaos", "", "processes")


def group_of(file: Path) -> str:
    """The files that ``file`` has to be run together with; empty: it stands alone."""
    return next((name for name, files in _TOGETHER.items() if any(map(file.match, files))), "")


def turn(file: Path) -> int:
    """Files with a lower one are begun earlier."""
    return _ORDER.index(group_of(file))


class GroupScheduling(LoadScopeScheduling):
    """Hands out groups and single files, in the order of their collection."""

    def _split_scope(self, nodeid: str) -> str:
        file = nodeid.split("::", 1)[0]
        return group_of(Path(file)) or file
