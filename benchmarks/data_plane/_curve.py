"""``--curve``: the same measurement with plain sockets, then once more with every one of them encrypted.

One key directory serves all processes of a benchmark, as the processes of one node share theirs; they find it by a
variable of the environment. Our transports then run CURVE and the allow-list as in production; the raw sockets that are
the limit get the same keys, so that ``ratio`` stays what the runtime costs, and ``of_plain`` is what encryption costs.
"""

from __future__ import annotations

import argparse
import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import zmq

from benchmarks._command import Result
from transport.zmq.security import NodeKeys, generate_keys, load_keys, write_keys

_VARIABLE: Final = "HEADRACE_BENCH_KEYS"
_MEASURED: Final = ("per_second", "_us", "_ms")
"""Parts of the names of figures that encryption can change."""


def add_option(parser: argparse.ArgumentParser) -> None:
    """``--curve``."""
    parser.add_argument("--curve", action="store_true", help="with plain sockets, then again with encrypted ones")


@contextmanager
def keys_for_all() -> Iterator[None]:
    """New keys for this process and those that it starts, while the block lasts."""
    with tempfile.TemporaryDirectory(prefix="headrace-bench-keys-") as directory:
        write_keys(generate_keys(), Path(directory) / "keys")
        os.environ[_VARIABLE] = str(Path(directory) / "keys")
        try:
            yield
        finally:
            del os.environ[_VARIABLE]


def keys() -> NodeKeys | None:
    """Those of this benchmark; None where sockets are plain."""
    directory = os.environ.get(_VARIABLE)
    return load_keys(Path(directory)) if directory else None


def secure_listener(socket: zmq.Socket[Any]) -> None:
    """Give a raw socket that will bind the benchmark's keys, if there are any."""
    if (pair := keys()) is not None:
        _give(socket, pair)
        socket.setsockopt(zmq.CURVE_SERVER, 1)


def secure_dialer(socket: zmq.Socket[Any]) -> None:
    """Give a raw socket that will connect the benchmark's keys, if there are any."""
    if (pair := keys()) is not None:
        _give(socket, pair)
        socket.setsockopt(zmq.CURVE_SERVERKEY, pair.public)


def _give(socket: zmq.Socket[Any], pair: NodeKeys) -> None:
    socket.setsockopt(zmq.CURVE_PUBLICKEY, pair.public)
    socket.setsockopt(zmq.CURVE_SECRETKEY, pair.secret)


def plain_and_secure(measure: Callable[[], Result], options: argparse.Namespace) -> Result:
    """What ``measure`` finds; with ``--curve`` what it finds with keys, and beside that the plain figures."""
    plain = measure()
    if not options.curve:
        return plain
    with keys_for_all():
        found = measure()
    return {**found, "curve": True, "of_plain": quotients(found, plain), "plain": plain}


def quotients(found: Result, plain: Result) -> Result:
    """Each measured figure with keys over the one without: below 1 is worse for a rate, above 1 for a time."""
    result: Result = {}
    for name, value in found.items():
        before = plain.get(name)
        if isinstance(value, dict) and isinstance(before, dict):
            if inner := quotients(value, before):
                result[name] = inner
        elif before and isinstance(value, int | float) and any(part in name for part in _MEASURED):
            result[name] = round(value / before, 3)
    return result


def baseline_name(name: str, options: argparse.Namespace) -> str:
    """Encrypted figures have a baseline of their own."""
    return f"{name}_curve" if options.curve else name
