"""One episode in its own process, which the zygote forks and which runs the user's environment or agent.

    zygote ─ fork ─▶ guard ─ fork ─▶ leader of a group ─▶ directory, log, limits, seeds ─▶ drive ─▶ line of JSON ─▶ end

    {"reward": number, "cause": "ended"|"turns"|"tokens"|"context"|"time", "metrics": {name: number}}
    {"failed": sentence, "kind": FailureKind, "broken": whether it can never work}

Invariants
- Its random numbers depend on the episode, not on the attempt: an episode that is begun again makes the same choices,
  so the ledger answers what it asks, and no token is lost.
- The process ends as soon as its line is written: threads and processes that user code has left behind end with it.
"""

from __future__ import annotations

import json
import os
import random
import resource
import sys
import tempfile
import traceback
from collections.abc import Callable, Mapping
from typing import Any, Final, NoReturn, Protocol

import msgspec

from actors.environments.episodes.endpoint import Endpoint
from actors.environments.episodes.errors import EnvironmentRefused, GatewayAway, SessionOver, ToolServerDied
from actors.environments.episodes.interface import Outcome
from actors.environments.errors import RowChanged
from actors.environments.scoring.scorer_frames import as_text
from actors.host.parent_death import lead_group
from actors.host.standard_streams import open_standard_streams
from actors.host.user_code import described
from actors.protocol.failures import FailureKind
from configs.schema import JobConfig
from configs.task_schema import DataConfig

_GENERATORS: Final = (("random", "seed"), ("numpy.random", "seed"), ("torch", "manual_seed"))
"""Modules with random numbers of their own, and the function that seeds them."""


class EpisodeOrder(msgspec.Struct, frozen=True, kw_only=True):
    """Says which episode to drive, and where."""

    key: str
    """Name of the episode among those of its worker."""
    directory: str
    """Working directory, which exists already."""
    log: str
    """File for what the episode prints."""
    context: bytes = b""
    """Context of the row, as the prompt source wrote it; empty in a trial, which reads no row."""
    seed: str = ""
    """Seed of its random numbers."""
    left_s: float = 0.0
    base_url: str = ""
    session: str = ""
    """Session key; empty in a trial, which finds out whether an episode could be driven."""
    again: bool = False
    """Whether the episode was begun before."""


class Driver(Protocol):
    """Drives episodes of one kind of environment."""

    def trial(self) -> None:
        """Raise EnvironmentRefused for what would make every episode fail."""
        ...

    def drive(self, row: Mapping[str, Any], endpoint: Endpoint, *, data: DataConfig, again: bool) -> Outcome:
        """Run one episode to its end. ``data``: the source of the row."""
        ...

    def lives(self) -> bool:
        """Whether what episodes need beside their own process is still there; the zygote asks."""
        return True


RowOf = Callable[[bytes], tuple[dict[str, Any], DataConfig]]
"""Maps a context to the row of the data that it names, and that row's source."""


def live(job: JobConfig, driver: Driver, row_of: RowOf, order: EpisodeOrder, result: int) -> NoReturn:
    """Run one episode in this process, right after the fork, and exit. ``result``: descriptor for its line."""
    try:
        lead_group(os.getppid())
        _settle_in(order, job)
        said = _trial(driver) if not order.session else _episode(job, driver, row_of, order)
        line = json.dumps(said).encode() + b"\n"
        if len(line) > job.limits.episode_result_bytes:
            line = json.dumps(_failed(f"its result has {len(line)} bytes", FailureKind.NO_RESULT)).encode() + b"\n"
        sys.stdout.flush()
        while line:
            line = line[os.write(result, line) :]
    except BaseException:  # noqa: BLE001 (nothing above would catch it)
        traceback.print_exc()
        os._exit(os.EX_SOFTWARE)
    os._exit(os.EX_OK)


def _settle_in(order: EpisodeOrder, job: JobConfig) -> None:
    log = os.open(order.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    nothing = os.open(os.devnull, os.O_RDONLY)
    for ours, number in ((nothing, 0), (log, 1), (log, 2)):
        os.dup2(ours, number)
    open_standard_streams(unbreakable=True)
    os.chdir(order.directory)
    os.environ["TMPDIR"] = tempfile.tempdir = order.directory
    hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
    largest = job.limits.episode_file_bytes
    resource.setrlimit(resource.RLIMIT_FSIZE, (largest if hard < 0 else min(largest, hard), hard))
    _seed(order.seed)
    os.environ["OPENAI_BASE_URL"] = os.environ["HEADRACE_BASE_URL"] = order.base_url
    os.environ["OPENAI_API_KEY"] = os.environ["HEADRACE_SESSION"] = order.session


def _seed(seed: str) -> None:
    """Seed each random number generator that user code may have loaded with ``seed``."""
    number = random.Random(seed).getrandbits(32)
    for name, function in _GENERATORS:
        if (module := sys.modules.get(name)) is not None:
            getattr(module, function)(number)


def _trial(driver: Driver) -> dict[str, Any]:
    try:
        driver.trial()
    except (Exception, SystemExit, KeyboardInterrupt) as error:  # noqa: BLE001 (user code)
        traceback.print_exc()
        return _failed(described(error), FailureKind.NO_RESULT, broken=isinstance(error, EnvironmentRefused))
    return {"reward": 0.0}


def _episode(job: JobConfig, driver: Driver, row_of: RowOf, order: EpisodeOrder) -> dict[str, Any]:
    certificate = job.gateway.tls_certificate
    try:
        endpoint = Endpoint(
            order.base_url, order.session, job.name, left_s=order.left_s, limits=job.limits, certificate=certificate
        )
        row, data = row_of(order.context)
        outcome = driver.drive(row, endpoint, data=data, again=order.again)
    except (GatewayAway, SessionOver, ToolServerDied) as error:
        return _failed(str(error), FailureKind.INFRASTRUCTURE)
    except RowChanged as error:
        return _failed(str(error), FailureKind.DATA)
    except (Exception, SystemExit, KeyboardInterrupt) as error:  # noqa: BLE001 (user code: no Ctrl-C comes here)
        traceback.print_exc()
        return _failed(described(error), FailureKind.NO_RESULT)
    return {"reward": outcome.reward, "cause": outcome.cause, "metrics": dict(outcome.metrics)}


def _failed(text: str, kind: FailureKind, *, broken: bool = False) -> dict[str, Any]:
    return {"failed": as_text(text), "kind": kind.value, "broken": broken}
