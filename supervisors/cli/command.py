"""Shared by the commands: options that mean the same everywhere, exit codes, and messages made from errors.

Exit codes: 0 finished; 1 failed; 2 bad configuration or usage; 130 interrupted, after a checkpoint.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final, NoReturn, TypeVar

import typer

from actors.core.terminal_text import harmless
from configs.errors import ConfigError, Problem
from transport.errors import HeadraceError

if TYPE_CHECKING:
    from configs.schema import JobConfig
    from supervisors.machine.devices import Devices

EXIT_FINISHED: Final = 0
EXIT_FAILED: Final = 1
EXIT_BAD_CONFIG: Final = 2
EXIT_INTERRUPTED: Final = 130

T = TypeVar("T")
Json = Annotated[bool, typer.Option("--json", help="JSON only on stdout; the last line is the result.")]
Control = Annotated[
    str | None,
    typer.Option(help="Control endpoint, such as tcp://127.0.0.1:7000. Default: in the run directory."),
]
Keys = Annotated[
    Path | None,
    typer.Option(help="Key directory of this node, made with headrace keys; needed beyond this machine."),
]
ControlKeys = Annotated[
    Path | None,
    typer.Option(help="Key directory of the control socket, not the nodes' one; needed beyond this machine."),
]
DeviceOption = Annotated[
    str | None,
    typer.Option(
        "--devices", metavar="N|IDS|none", help="Devices of this machine that it may use: a number, ids, or none. "
        "Default: all that are found."
    ),
]  # fmt: skip


def fail(message: str, code: int) -> NoReturn:
    """End the command with ``message`` on stderr."""
    print(f"headrace: {harmless(message)}", file=sys.stderr, flush=True)
    raise typer.Exit(code)


def wrong(where: str, what: str, fix: str) -> ConfigError:
    """An error about an argument that cannot be used."""
    return ConfigError([Problem(where, "", what, fix)])


def finish(start: Callable[[], Coroutine[Any, Any, T]]) -> T:
    """Run a coroutine to its end; errors become messages and exit codes.

    The first Ctrl-C cancels the main task, which is to take its checkpoint and return; a second one ends the process.
    """
    from supervisors.machine.processes.logs import new_loop

    try:
        with asyncio.Runner(loop_factory=new_loop) as runner:
            return runner.run(start())
    except ConfigError as error:
        fail(str(error), EXIT_BAD_CONFIG)
    except (KeyboardInterrupt, asyncio.CancelledError):
        fail("interrupted", EXIT_INTERRUPTED)
    except (HeadraceError, OSError) as error:
        fail(f"{type(error).__name__}: {error}", EXIT_FAILED)


def check_sockets(keys: Path | None, control_keys: Path | None, *, listen: str | None, at: str | None) -> None:
    """End the command if the head could not listen at ``listen``, or its control socket ``at``, with these keys."""
    from supervisors.head.head_keys import check_sockets as check
    from supervisors.head.head_keys import load_head_keys
    from transport.zmq.own_keys import directory_or_own

    def check_both() -> None:
        nodes = directory_or_own(keys, listen or "", "nodes")
        control = directory_or_own(control_keys, at or "", "control")
        check(load_head_keys(nodes, control), listen=listen, control=at)

    refuse_bad_sockets(check_both)


def devices_of_this_machine(option: str | None, *jobs: JobConfig) -> Devices:
    """The devices that ``--devices`` allows; ends the command with exit code 2 if the option or a job asks for more."""
    from supervisors.jobs.device_needs import device_problems
    from supervisors.machine.devices import find_devices
    from supervisors.tree.errors import NoSuchDevices

    try:
        found = find_devices(option)
    except NoSuchDevices as error:
        fail(str(error), EXIT_BAD_CONFIG)
    problems = [
        Problem(f"job {job.name}", *problem) for job in jobs for problem in device_problems(job, len(found.ids))
    ]
    if problems:
        fail(str(ConfigError(problems)), EXIT_BAD_CONFIG)
    return found


def refuse_bad_sockets(check: Callable[[], None]) -> None:
    """End the command with exit code 2 for unusable keys, an invalid address, or a socket open to everybody."""
    from transport.errors import HandshakeRefused, InsecureBind
    from transport.zmq.security import KeyFileError

    try:
        check()
    except (KeyFileError, InsecureBind, HandshakeRefused, ValueError) as error:
        fail(str(error), EXIT_BAD_CONFIG)
