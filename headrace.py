"""Headrace from Python: ``import headrace``.

    run = headrace.start("quickstart", {"steps": 20})
    for event in run.events(): print(event)
    summary = run.wait()

Guide: ``docs/guides/python.md``. What is here is written in ``supervisors/api``.
"""

from __future__ import annotations

from actors.control.errors import ControlError
from actors.host.room import NoSpaceLeft
from configs.errors import ConfigError
from configs.schema import JobConfig as Job
from configs.version import version
from supervisors.api import Event, Events, NoRun, Run, RunFailed, connect, resume, run_job, start
from supervisors.tree.errors import DirectoryInUse
from transport.errors import HeadraceError

__version__ = version()

__all__ = [
    "ConfigError",
    "ControlError",
    "DirectoryInUse",
    "Event",
    "Events",
    "HeadraceError",
    "Job",
    "NoRun",
    "NoSpaceLeft",
    "Run",
    "RunFailed",
    "__version__",
    "connect",
    "resume",
    "run_job",
    "start",
]
