"""While a simulation runs, calls of this project's code to clocks, randomness and the real world raise an error.

    with guarded() as breaches:
        ... time.time() in actors/x.py ─▶ NotDeterministic("time.time is called by actors.x, line 7: …")

Guarded are wall and process clocks, sleeping, the module-level functions of ``random``, true randomness (also that of a
generator made without a seed), threads, sockets and subprocesses, however they were imported. Only calls from the
packages of this project are stopped; a library may look at the clock for its own ends. A simulation has one thread, and
may start none: calls of others, which a program had before, are theirs. ``breaches`` keeps every message, since an
actor's supervisor may have taken the exception for a crash.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import os
import random
import secrets
import socket
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable, Generator
from types import FrameType
from typing import Any, Final

import numpy as np

from transport.sim.loop import SimulationError

PACKAGES: Final = ("actors", "configs", "supervisors", "transport")
CLOCK: Final = "time is the loop's clock: ctx.now(), ctx.sleep(); time_of_day_s() for people"
RANDOM: Final = "randomness is a named stream: ctx.rng(name)"
WORLD: Final = "a simulation has none: hand in a simulated part"

GUARDED: Final[list[tuple[Any, str, str]]] = [
    *((time, name, CLOCK) for name in ("time", "time_ns", "monotonic", "monotonic_ns", "perf_counter",
                                       "perf_counter_ns", "process_time", "sleep")),
    *((random, name, RANDOM) for name in ("random", "randint", "randrange", "choice", "choices", "sample", "shuffle",
                                          "uniform", "triangular", "gauss", "normalvariate", "lognormvariate",
                                          "expovariate", "betavariate", "gammavariate", "vonmisesvariate",
                                          "paretovariate", "weibullvariate", "getrandbits", "randbytes", "seed")),
    *((random.SystemRandom, name, RANDOM) for name in ("random", "getrandbits", "randbytes")),
    *((uuid, name, RANDOM) for name in ("uuid1", "uuid4")),
    *((secrets, name, RANDOM) for name in ("randbits", "randbelow", "choice", "token_bytes", "token_hex",
                                           "token_urlsafe")),
    (os, "urandom", RANDOM),
    (os, "fork", WORLD),
    (threading.Thread, "start", WORLD),
    (socket.socket, "__init__", WORLD),
    (subprocess.Popen, "__init__", WORLD),
]  # fmt: skip

SEEDED: Final[list[tuple[Any, str, int]]] = [
    (random.Random, "seed", 1),
    (np.random, "default_rng", 0),
]
"""Functions that draw true randomness unless this argument, by its number, gives them a seed."""
_THROUGH: Final = ("random", "secrets")
"""Modules that only pass a call on: the one to blame is their caller."""


class NotDeterministic(SimulationError):
    """Code asked for real time, true randomness, a thread, a socket or a process in a simulation, which is a bug."""


@contextlib.contextmanager
def guarded() -> Generator[list[str]]:
    """Make the guarded calls raise until the end of the block; yields the messages of those that were made."""
    breaches: list[str] = []
    saved: list[tuple[Any, str, Any]] = []
    guards: dict[int, tuple[Any, Any]] = {}
    try:
        for owner, name, advice, seed_at in [*((*known, None) for known in GUARDED),
                                             *((owner, name, RANDOM, at) for owner, name, at in SEEDED)]:  # fmt: skip
            original = getattr(owner, name)
            saved.append((owner, name, original))
            guard = _guard(original, f"{owner.__name__}.{name}", advice, breaches, seed_at)
            guards[id(original)] = original, guard
            setattr(owner, name, guard)
        for module, name, original in list(_imported_by_name(guards)):
            saved.append((module, name, original))
            setattr(module, name, guards[id(original)][1])
        yield breaches
    finally:
        for owner, name, original in reversed(saved):
            setattr(owner, name, original)


def _imported_by_name(guards: dict[int, tuple[Any, Any]]) -> Generator[tuple[Any, str, Any]]:
    """Guarded functions that modules of this project have imported by name, as in ``from time import monotonic``."""
    for module_name, module in list(sys.modules.items()):
        if module_name.partition(".")[0] in PACKAGES and module_name != __name__:
            for name, value in list(vars(module).items()):
                if (found := guards.get(id(value))) is not None and found[0] is value:
                    yield module, name, value


def _guard(
    original: Callable[..., Any], called: str, advice: str, breaches: list[str], seed_at: int | None
) -> Callable[..., Any]:
    # A library may read a clock when our code calls it, but may not start a thread or open a socket for our code.
    deep = advice is WORLD
    simulation = threading.get_ident()

    @functools.wraps(original)
    def guard(*args: Any, **kwargs: Any) -> Any:
        if threading.get_ident() != simulation:
            return original(*args, **kwargs)
        if seed_at is not None and any(seed is not None for seed in (*args[seed_at : seed_at + 1], *kwargs.values())):
            return original(*args, **kwargs)
        frame = _product_frame(inspect.currentframe(), deep=deep)
        if frame is None:
            return original(*args, **kwargs)
        caller = frame.f_globals.get("__name__", "?")
        breach = f"{called} is called by {caller}, line {frame.f_lineno}, in a simulation: {advice}"
        breaches.append(breach)
        raise NotDeterministic(breach)

    return guard


def _product_frame(frame: FrameType | None, *, deep: bool) -> FrameType | None:
    """The caller of ``frame`` if it is code of this project; with ``deep``, the nearest of its callers that is."""
    frame = None if frame is None else frame.f_back
    while frame is not None:
        name = str(frame.f_globals.get("__name__", ""))
        if name.partition(".")[0] in PACKAGES:
            return None if name.startswith("transport.sim.") else frame
        if not deep and name not in _THROUGH:
            return None
        frame = frame.f_back
    return None
