"""Headrace from Python: start a run, follow it, look at it; in a script, in a notebook, in a program with a loop.

    from headrace import connect, resume, run_job, start

    run = start("quickstart", {"steps": 20})        a process of its own, which ends when nobody holds ``run`` any more
    for event in run.events(): print(event)         or ``async for``
    run.wait()                                      or ``await run.result()``
    connect("runs/quickstart").metrics()            a run that somebody else started, live or over
    serve({"base": "DIR"}).create_model("base")     a model that a loop of your own trains, in this process

Guides: ``docs/guides/python.md``, ``docs/guides/own_loop.md``.
"""

from __future__ import annotations

from actors.control.errors import ControlError
from configs.errors import ConfigError
from supervisors.api.errors import ModelLost, ModelRefused, NoRun, RunFailed
from supervisors.api.events import Event, Events
from supervisors.api.models import LocalServer, Model, ModelSampler, datum, serve
from supervisors.api.run import Run
from supervisors.api.start import connect, resume, run_job, start

__all__ = [
    "ConfigError",
    "ControlError",
    "Event",
    "Events",
    "LocalServer",
    "Model",
    "ModelLost",
    "ModelRefused",
    "ModelSampler",
    "NoRun",
    "Run",
    "RunFailed",
    "connect",
    "datum",
    "resume",
    "run_job",
    "serve",
    "start",
]
