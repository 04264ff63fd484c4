"""The modes of a fleet, by their names in the job file. A new mode is named here and in ``configs/schema.py``."""

from __future__ import annotations

from typing import Final

from actors.fleet.length_ranking import LengthRanking
from actors.fleet.modes.balanced import Balanced
from actors.fleet.modes.mode import Mode
from actors.fleet.modes.plain import Plain
from actors.fleet.modes.planned import Planned
from actors.fleet.modes.seeding import Seeding
from actors.fleet.scope import JobScope
from actors.fleet.versions import Versions

MODES: Final[dict[str, type[Mode]]] = {"assign": Plain, "rlboost": Balanced, "planned": Planned}
"""Class that shares the work among workers, by the value of ``scheduling.policy``."""


def make_mode(scope: JobScope, versions: Versions, ranking: LengthRanking) -> Mode:
    """The mode that the job file names, inside ``Seeding`` if ``scheduling.seeding`` is set."""
    scheduling = scope.job.scheduling
    mode = MODES[scheduling.policy](scope, versions, ranking)
    return Seeding(scope, versions, ranking, mode) if scheduling.seeding else mode
