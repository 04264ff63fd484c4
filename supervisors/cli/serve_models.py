"""``headrace serve``: models for programs that train and sample with the client ``tinker``.

--model …, --services FILE │ one service of this machine ─▶ ServingConfig ─▶ a head that serves nothing else
headrace head --serve FILE ───────────────────────────────▶ the same, beside jobs
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from configs.errors import ConfigError, Problem
from supervisors.cli.command import EXIT_BAD_CONFIG, DeviceOption, devices_of_this_machine, fail, finish
from supervisors.cli.running.services_file import ServicesFile, services_of
from supervisors.cli.running.serving_file import check_tls, require_client
from supervisors.cli.serve import alone_in

if TYPE_CHECKING:
    from configs.services import ServicesConfig

_OWN_SERVICE: Final = "train-0"
_MEMORY_SHARE: Final = 0.5
"""Share of this machine's memory for trained state, where no services file says it."""


def serve(
    model: Annotated[
        list[str],
        typer.Option(metavar="[NAME=]DIR", help="A base model: a Hugging Face directory. Repeatable."),
    ],
    services: ServicesFile = None,
    workers: Annotated[int, typer.Option(min=1, help="Processes that sample, for each model.")] = 1,
    listen: Annotated[
        str, typer.Option(metavar="HOST:PORT", help="Where clients come; beyond this machine with --tls alone.")
    ] = "127.0.0.1:8900",
    tls: Annotated[str | None, typer.Option(metavar="PEM", help="Certificate to listen with.")] = None,
    tls_key: Annotated[str | None, typer.Option(metavar="PEM", help="The certificate's key.")] = None,
    tenants: Annotated[
        Path | None, typer.Option(metavar="TENANTS.yaml", help="Quotas of tenants: models, tokens/s, bytes.")
    ] = None,
    prometheus_port: Annotated[
        int | None, typer.Option(min=0, max=65535, help="Show what tenants use at this port of 127.0.0.1.")
    ] = None,
    dir_: Annotated[
        Path, typer.Option("--dir", help="Where operations and saved states are kept; with it, it goes on.")
    ] = Path("served"),
    tenant: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME", help="Print a key of this tenant. Repeatable; headrace keys makes further ones."),
    ] = None,
    devices: DeviceOption = None,
) -> None:
    """Serve models to programs that use the tinker client, until stopped."""
    from configs.serving import ServingConfig, address_of, models_named, problems_of, service_for
    from configs.tenants import TENANT_NAME, TenantsConfig, load_tenants
    from supervisors.cli.running.job_lines import JobLines
    from supervisors.trees import run_head

    require_client()
    found = devices_of_this_machine(devices)
    try:
        shared = services_of(services, None) or _own_service()
        host, port = address_of(listen)
        serving = ServingConfig(
            models=models_named(model), directory=str(dir_), host=host, port=port, tls_certificate=tls, tls_key=tls_key,
            quotas=TenantsConfig() if tenants is None else load_tenants(tenants), prometheus_port=prometheus_port,
            samplers=workers,
        )  # fmt: skip
        service_for(serving, shared)
        for name in tenant or ():
            if re.fullmatch(TENANT_NAME, name) is None:
                raise ConfigError.of(
                    "--tenant", "", f"{name!r} is no name of a tenant", "Use 1 to 32 of a-z, 0-9 and _"
                )
        if problems := [Problem("headrace serve", *found) for found in problems_of(serving)]:
            raise ConfigError(problems)
        check_tls(serving)
    except ConfigError as error:
        fail(str(error), EXIT_BAD_CONFIG)
    lines = JobLines(lambda line: print(line, flush=True))
    keys = _Keys(dir_, tenant or ([] if tenants else ["me"]))

    def hear(progress: Mapping[str, Any]) -> None:
        lines.update(progress)
        if "TINKER_BASE_URL" in str(progress.get("message")):
            keys.tell()

    with alone_in(dir_):
        print(f"serving       {', '.join(one.name for one in serving.models)}", flush=True)
        finish(lambda: run_head(dir_, None, services=shared, serving=serving, devices=found, on_progress=hear))


def _own_service() -> ServicesConfig:
    """One service, with half of this machine's memory."""
    from configs.services import ServiceConfig, ServicesConfig

    memory_bytes = int(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") * _MEMORY_SHARE)
    service = ServiceConfig(name=_OWN_SERVICE, memory_bytes=memory_bytes, host_bytes=memory_bytes // 2)
    return ServicesConfig(services=[service])


class _Keys:
    """Prints keys of ``tenants`` of the server in ``directory``, once."""

    def __init__(self, directory: Path, tenants: list[str]) -> None:
        self._directory, self._tenants = directory, tenants

    def tell(self) -> None:
        from actors.tinker.keys import TenantKeys

        keys, tenants = TenantKeys.of_directory(self._directory), self._tenants
        self._tenants = []
        for tenant in tenants:
            print(f"key           TINKER_API_KEY={keys.sign(tenant)}    for {tenant}", flush=True)
