"""``headrace head`` serves jobs that come over a socket; ``headrace node`` lends a machine to a head."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from configs.errors import ConfigError
from configs.local_paths import RUN_ROOT
from supervisors.cli.command import (
    EXIT_BAD_CONFIG,
    EXIT_FAILED,
    Control,
    ControlKeys,
    DeviceOption,
    Keys,
    check_sockets,
    devices_of_this_machine,
    fail,
    finish,
    refuse_bad_sockets,
)
from supervisors.cli.running.services_file import ServicesFile, services_of
from supervisors.cli.running.serving_file import served_by

if TYPE_CHECKING:
    from supervisors.machine.run_directory import RunLock


def head(
    listen: Annotated[str, typer.Option(help="Where nodes join.")] = "tcp://127.0.0.1:7001",
    control: Control = None,
    dir_: Annotated[Path, typer.Option("--dir", help="Where run directories are made.")] = RUN_ROOT,
    services: ServicesFile = None,
    serve: Annotated[
        Path | None,
        typer.Option(
            metavar="SERVING.yaml",
            help="Models for programs that use the tinker client, trained by one of the --services.",
        ),
    ] = None,
    devices: DeviceOption = None,
    keys: Keys = None,
    control_keys: ControlKeys = None,
    allow_functions: Annotated[
        list[str] | None,
        typer.Option(
            metavar="PREFIX",
            help="Jobs may name functions that begin so, such as my_rewards, and remote scorers such as "
            "https://host:8000; repeatable. Default: any, so whoever may submit may run code.",
        ),
    ] = None,
) -> None:
    """Serve jobs that come over the control socket, on nodes that join, until stopped."""
    check_sockets(keys, control_keys, listen=listen, at=control)
    found = devices_of_this_machine(devices)
    from supervisors.cli.running.job_lines import JobLines
    from supervisors.trees import run_head

    try:
        shared = services_of(services, None)
        serving = served_by(serve, shared) if serve is not None else None
    except ConfigError as error:
        fail(str(error), EXIT_BAD_CONFIG)
    lines = JobLines(lambda line: print(line, flush=True))
    with alone_in(dir_):
        finish(
            lambda: run_head(
                dir_,
                None,
                listen=listen,
                control=control,
                keys=keys,
                control_keys=control_keys,
                allow_functions=allow_functions,
                services=shared,
                serving=serving,
                devices=found,
                on_progress=lines.update,
            )
        )


def alone_in(directory: Path) -> RunLock:
    """Lock ``directory``: a second head there would forget the first one's jobs and remove its services' files."""
    from supervisors.machine.run_directory import RunLock
    from supervisors.tree.errors import DirectoryInUse
    from transport.errors import HeadraceError

    try:
        return RunLock.take(directory)
    except DirectoryInUse as error:
        fail(str(error), EXIT_BAD_CONFIG)
    except (HeadraceError, OSError) as error:
        fail(f"--dir {directory} cannot be written: {error}", EXIT_FAILED)


def node(
    join: Annotated[str, typer.Option(metavar="ADDR", help="The head's address, as it printed it.")],
    name: Annotated[
        str | None,
        typer.Option(help="This node's name. Default: the host's name and a number."),
    ] = None,
    slots: Annotated[
        int | None,
        typer.Option(min=1, help="Rollout workers at most. Default: one on each device, else on each core."),
    ] = None,
    kind: Annotated[str, typer.Option(help="What it is priced as: a key of cluster.prices.")] = "reserved",
    site: Annotated[
        str, typer.Option(help="Its data centre, if that is not the head's: weights enter each once.")
    ] = "",
    notice: Annotated[
        float,
        typer.Option(
            metavar="SECONDS", min=0, help="How long it is still there after SIGTERM: workers go on meanwhile."
        ),
    ] = 0.0,
    devices: DeviceOption = None,
    keys: Keys = None,
) -> None:
    """Lend this machine to a head, until stopped."""
    from supervisors.machine.membership.node import check_join, check_node

    refuse_bad_sockets(lambda: check_node(name, kind, site, notice))
    refuse_bad_sockets(lambda: check_join(join, keys))
    found = devices_of_this_machine(devices)
    from supervisors.trees import run_node

    finish(
        lambda: run_node(
            join=join, name=name, slots=slots, keys=keys, kind=kind, site=site, notice_s=notice, devices=found
        )
    )
