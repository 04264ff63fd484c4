"""The sockets at which the gateway listens: opened by the process that starts it, and inherited by each of its lives.

    machine process ── opens, keeps ──▶ sockets ── inherited ──▶ gateway ── dies ──▶ clients wait ──▶ its next life

Invariants
- While the run's machine process lives, nobody else can have the gateway's address: not between two lives either.
- An address of an earlier machine process is taken again. If somebody else has it, the file that names it is removed
  before any process of this run can read it, and the gateway's lives are told that they have ``moved``.
"""

from __future__ import annotations

import contextlib
import errno
import os
import socket
from dataclasses import dataclass
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit

from configs.episode_schema import GatewayConfig
from configs.run_files import GATEWAY_ENDPOINT

VARIABLE: Final = "HEADRACE_LISTENERS"
_MOVED: Final = "moved"


@dataclass(frozen=True)
class Listeners:
    """Holds the sockets of one gateway."""

    sockets: list[socket.socket]
    moved: bool
    """Whether agents of an earlier life know another address, which somebody else may have now."""

    @property
    def port(self) -> int:
        return self.sockets[0].getsockname()[1]

    def for_child(self, run_dir: Path) -> tuple[tuple[int, ...], dict[str, str]]:
        """Descriptors that a life of the gateway inherits, and the variable that names them."""
        numbers = tuple(one.fileno() for one in self.sockets)
        moved = self.moved and not (run_dir / GATEWAY_ENDPOINT).exists()  # written once the scheduler knows
        return numbers, {VARIABLE: " ".join([",".join(map(str, numbers)), _MOVED if moved else ""])}

    def close(self) -> None:
        for one in self.sockets:
            one.close()


def inherited() -> Listeners | None:
    """The sockets that this process was started with; None if there are none."""
    numbers, _, moved = os.environ.pop(VARIABLE, "").partition(" ")
    if not numbers:
        return None
    return Listeners([socket.socket(fileno=int(number)) for number in numbers.split(",")], moved == _MOVED)


def open_listeners(gateway: GatewayConfig, run_dir: Path) -> Listeners:
    """Listen at the job's address: at ``gateway.port``, at the port of an earlier life, or at any.

    Raises:
        OSError: the address is none of this machine's, or is taken.
    """
    file = run_dir / GATEWAY_ENDPOINT
    before = _port_before(file)
    sockets = None
    if not gateway.port and before:
        with contextlib.suppress(OSError):
            sockets = _bound(gateway.host, before)
    found = Listeners(sockets or _bound(gateway.host, gateway.port or 0), moved=False)
    if gateway.public_url or before in (0, found.port):
        return found
    file.unlink(missing_ok=True)
    return Listeners(found.sockets, moved=True)


def _bound(host: str, port: int) -> list[socket.socket]:
    """A socket for each address of ``host``, all with one port. Raises OSError: none can be had, or one is taken."""
    sockets: list[socket.socket] = []
    lacking: OSError | None = None
    with contextlib.ExitStack() as failed:
        for family, kind, number, _, at in dict.fromkeys(socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)):
            with contextlib.ExitStack() as refused:
                try:
                    one = refused.enter_context(socket.socket(family, kind, number))
                    one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                    if family == socket.AF_INET6:
                        one.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
                    one.bind((at[0], port, *at[2:]))
                    one.listen()
                except OSError as error:
                    if error.errno not in (errno.EAFNOSUPPORT, errno.EADDRNOTAVAIL):
                        raise
                    lacking = error  # this machine has no addresses of that family
                    continue
                failed.push(refused.pop_all())
            port = one.getsockname()[1]
            sockets.append(one)
        if lacking is not None and not sockets:
            raise lacking
        failed.pop_all()
    return sockets


def _port_before(file: Path) -> int:
    """The port of an earlier life; 0 if there was none."""
    try:
        return urlsplit(file.read_text().strip()).port or 0
    except (OSError, ValueError):
        return 0
