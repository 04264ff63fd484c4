"""The option ``--services FILE``: which training services there are, and whether they can serve a job.

--services FILE ─▶ load_services ─┐
run directory of a resumed run ───┴─▶ ServicesConfig ─▶ a job that no service can serve is refused before it begins
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from configs.errors import ConfigError, Problem

if TYPE_CHECKING:
    from configs.schema import JobConfig
    from configs.services import ServicesConfig

ServicesFile = Annotated[
    Path | None,
    typer.Option("--services", metavar="SERVICES.yaml", help="Training services that jobs share, as trainer.service "
                 "names them."),
]  # fmt: skip


def services_of(file: Path | None, resume: Path | None) -> ServicesConfig | None:
    """The services in ``file``, else those that the run in ``resume`` had; None if there are none.

    Raises:
        ConfigError: the file is wrong.
    """
    from configs.services import load_services
    from supervisors.sharing.service_register import ServiceRegister

    if file is not None:
        return load_services(file)
    if resume is None:
        return None
    register = ServiceRegister(resume)
    register.read(of_anyone=True)
    return register.now.rules if register.now.rules.services else None


def check_served(job: JobConfig, services: ServicesConfig | None) -> None:
    """Raises:
    ConfigError: none of ``services`` can ever serve ``job``, as far as that can be known before its model is there.
    """
    from configs.services import problems_with

    if problems := [Problem(f"job {job.name}", *found) for found in problems_with(job, services)]:
        raise ConfigError(problems)
