"""The part of the head that operations and reports use: what is here, and how a job is launched.

head.py ─▶ operations.py ─▶ stall_report.py        both know a HeadView, none of them the Head
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from actors.core.system import ActorSystem
from configs.limits import Limits
from configs.schema import JobConfig
from supervisors.jobs.job_run import JobRun
from supervisors.machine.membership.nodes import Nodes
from supervisors.nemesis.nemesis import Nemesis
from supervisors.serving.serving import Serving
from supervisors.sharing.admission import Admission
from supervisors.sharing.service_register import ServiceRegister
from supervisors.sharing.services import Services


class HeadView(Protocol):
    """What ``Head`` offers to ``Operations`` and ``StallReport``."""

    run_root: Path
    limits: Limits
    allow_functions: tuple[str, ...] | None
    system: ActorSystem
    nodes: Nodes
    jobs: dict[str, JobRun]
    services: Services
    service_register: ServiceRegister
    serving: Serving | None
    admission: Admission
    nemeses: dict[str, Nemesis]

    def launch(self, job: JobConfig, run_dir: Path) -> object:
        """Start a job and follow it to its end, without waiting for either."""
        ...

    async def name_is_free(self, job: str) -> bool:
        """Wait until nothing is left of the launched job of that name; False: it takes too long."""
        ...

    def subscribe(self, listener: Callable[[JobRun], None]) -> Callable[[], None]:
        """Call ``listener`` with each new job from now on; returns what ends that."""
        ...
