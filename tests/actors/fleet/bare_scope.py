"""A job's scope for tests of one part of its fleet: a ledger, workers, and a function that gets what they are told."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import numpy as np

from actors.core.message import Message
from actors.fleet.dispatch import Dispatcher
from actors.fleet.length_ranking import LengthRanking
from actors.fleet.modes.mode import Mode
from actors.fleet.modes.plain import Plain
from actors.fleet.scope import JobScope
from actors.fleet.workers import WorkerTable
from actors.ledger.ledger_writer import LedgerWriter
from configs.limits import DEFAULT_LIMITS
from transport.address import ActorAddress
from transport.transport import SendOutcome

Tell = Callable[[ActorAddress, Message], SendOutcome]


def bare_scope(
    ledger_writer: LedgerWriter, workers: WorkerTable, tell: Tell, staleness: int = 1, *, dedicates: bool = False
) -> JobScope:
    ctx = SimpleNamespace(ref=lambda address: SimpleNamespace(tell=lambda message: tell(address, message)))
    job = SimpleNamespace(
        name="j", limits=DEFAULT_LIMITS, staleness=staleness, sync=SimpleNamespace(mode="dynamic"),
        rollout=SimpleNamespace(dedicated_workers="simulated" if dedicates else "none"),
    )  # fmt: skip
    return JobScope(cast("Any", ctx), cast("Any", job), ledger_writer, workers, {}, None, lambda: None)


def dispatcher(scope: JobScope, ranking: LengthRanking | None = None, mode: Mode | None = None) -> Dispatcher:
    ranking = ranking or LengthRanking("j", None)
    mode = mode or Plain(scope, cast("Any", None), ranking)
    return Dispatcher(scope, mode, ranking, lambda _: np.empty(0, np.int32))
