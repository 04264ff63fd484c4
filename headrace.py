"""Headrace from Python: ``import headrace``.

    run = headrace.start("quickstart", {"steps": 20})
    for event in run.events(): print(event)
    summary = run.wait()

Guides: ``docs/guides/python.md``, ``docs/guides/own_loop.md``. What is here is written in ``supervisors/api``.
"""

from __future__ import annotations

from actors.control.errors import ControlError
from actors.host.room import NoSpaceLeft
from configs.errors import ConfigError
from configs.schema import JobConfig as Job
from configs.version import version
from supervisors.api import (
    Event,
    Events,
    LocalServer,
    Model,
    ModelLost,
    ModelRefused,
    ModelSampler,
    NoRun,
    Run,
    RunFailed,
    connect,
    datum,
    resume,
    run_job,
    serve,
    start,
)
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
    "LocalServer",
    "Model",
    "ModelLost",
    "ModelRefused",
    "ModelSampler",
    "NoRun",
    "NoSpaceLeft",
    "Run",
    "RunFailed",
    "__version__",
    "connect",
    "datum",
    "resume",
    "run_job",
    "serve",
    "start",
]
