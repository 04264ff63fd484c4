"""Ports for processes that must be told where to listen before they do."""

from __future__ import annotations

import random
import socket
from typing import Final

_BELOW_EPHEMERAL: Final = range(20_000, 30_000)
"""The system gives none of these to who dials or asks for any port, so they stay free until they are used."""


def free_ports(count: int = 5) -> int:
    """The first of ``count`` ports in a row at which somebody may listen: a head needs one for each lane."""
    for port in random.SystemRandom().sample(_BELOW_EPHEMERAL, 200):
        if all(_may_listen(port + offset) for offset in range(count)):
            return port
    raise AssertionError(f"no {count} free ports in a row in {_BELOW_EPHEMERAL}")


def _may_listen(port: int) -> bool:
    with socket.socket() as probe:
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True
