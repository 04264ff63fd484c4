"""Which process of ``make test`` runs which test.

    real runs that are harmed ─▶ benchmarks, children: one after the other ─▶ one process ┐
                                                                                           ├▶ what is left
    all other files, each as a whole, type checks first ────────────────────▶ another ────┘

Real runs take longest and so come first. They have several processes each and deadlines: two of them at once would be
late on two cores. Beside them are tests that need one core at most. A file stays together, for the sake of what its
module makes once.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

from xdist.scheduler import LoadScopeScheduling

_IN_ORDER: Final = (
    ("runs", ("tests/chaos/*.py", "tests/hosts/*.py")),
    (
        "runs",
        (
            "tests/benchmarks/*.py",
            "tests/benchmarks/peers/*.py",
            "tests/supervisors/faults/test_node_faults.py",
            "tests/supervisors/head/test_machine_process.py",
            "tests/supervisors/machine/test_process.py",
            "tests/supervisors/machine/test_role_processes.py",
        ),
    ),
    ("", ("tests/style/test_lint.py",)),
    ("", ("*",)),
)
"""The files of a group, which is run by one process; without a group each file stands alone. Those of ``runs`` start
processes of ours and look at the clock. Pyright takes longest of the others: begun last, it would be waited for."""


def group_of(file: Path) -> str:
    """The files that ``file`` has to be run together with; empty: it stands alone."""
    return _IN_ORDER[turn(file)][0]


def turn(file: Path) -> int:
    """Files with a lower one are begun earlier."""
    return next(turn for turn, (_, files) in enumerate(_IN_ORDER) if any(map(file.match, files)))


class GroupScheduling(LoadScopeScheduling):
    """Hands out groups and single files, in the order of their collection."""

    def _split_scope(self, nodeid: str) -> str:
        file = nodeid.split("::", 1)[0]
        return group_of(Path(file)) or file
