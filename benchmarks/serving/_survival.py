"""One program against a server that is struck, and against one that is not: what it was told, and what is left.

run undisturbed ─┐
                 ├─▶ Left: digests of losses and of saved weights, operations that the server has executed
run struck ──────┘   answers dropped and failed, kill -9 after drawn numbers of answered operations
"""

from __future__ import annotations

import contextlib
import hashlib
import queue
import random
import sqlite3
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from benchmarks._jobs import BenchmarkFailed
from benchmarks.jobs._shared_runs import hash_of_tensors
from benchmarks.serving._programs import Served, Told, Work, trained
from benchmarks.serving._proxy import Proxy

TENANT: Final = "alice"
_ENDINGS: Final = 2
"""Operations of the program after its last step: it saves, and makes a snapshot."""
_LOOK_S: Final = 0.2


@dataclass(frozen=True)
class Left:
    """What a run has come to."""

    losses: str
    weights: str
    executed: int
    """Number of operations that the server's log has answers to, all with different numbers and none left out."""
    seconds: float
    faults: dict[str, int]


def asked_operations(work: Work) -> int:
    """Number of operations that a program asks for: its requests after those that make the model."""
    requests = -(-work.datums // 1024) * work.calls  # the client cuts a call at 1024 datums
    return work.steps * (requests + 1) + _ENDINGS


def undisturbed(model: Path, directory: Path, work: Work) -> Left:
    log = _Log(directory)
    with Served(model, directory, [TENANT]) as server:
        told = trained(server.url, server.keys[TENANT], work, ending=log.read)
    return _left(log, told, {})


def struck(model: Path, directory: Path, work: Work, kills: int, seed: int) -> Left:
    """The same through a bad proxy, with the server's processes killed in turn."""
    moments = random.Random(f"kills {seed}").sample(range(1, asked_operations(work) - _ENDINGS), kills)
    strikes, log = queue.SimpleQueue[None](), _Log(directory)
    with Proxy(seed) as proxy, Served(model, directory, [TENANT]) as server:
        proxy.send_to(server.url)
        proxy.strike_after(moments, lambda: strikes.put(None))
        came = _beside(lambda: trained(proxy.url, server.keys[TENANT], work, ending=log.read))
        while (told := came()) is None:
            try:
                strikes.get(timeout=_LOOK_S)
            except queue.Empty:
                continue
            server.kill(proxy.counts["kills"])
            proxy.counts["kills"] += 1
            proxy.send_to(server.url)
    return _left(log, told, dict(sorted(proxy.counts.items())))


def _beside(work: Callable[[], Told]) -> Callable[[], Told | None]:
    """Begin ``work`` on a thread; returns a function that gives what it came to once it has, or raises its error."""
    found: list[Told | BaseException] = []

    def run() -> None:
        try:
            found.append(work())
        except BaseException as error:  # noqa: BLE001  it is raised where the result is asked for
            found.append(error)

    threading.Thread(target=run, name="client", daemon=True).start()

    def came() -> Told | None:
        told = found[0] if found else None
        if isinstance(told, BaseException):
            raise told
        return told

    return came


class _Log:
    """Reads what the server keeps of the only model, before its session ends and takes the answers along."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self.answered = list[int]()
        """Numbers of the operations that have answers, from 0, in order."""

    def read(self) -> None:
        file = f"file:{self._directory / 'operations.db'}?mode=ro"
        with contextlib.closing(sqlite3.connect(file, uri=True)) as db:
            rows = db.execute(
                "SELECT seq FROM operations JOIN models ON line = id WHERE answer IS NOT NULL ORDER BY seq"
            )
            self.answered = [row[0] for row in rows]
            ((saved,),) = db.execute("SELECT directory FROM weights WHERE kind = 'weights'").fetchall()
        self.weights = _hash_of(self._directory / saved)


def _left(log: _Log, told: Told, faults: dict[str, int]) -> Left:
    """Raises BenchmarkFailed: a number is missing in the log."""
    if log.answered != list(range(len(log.answered))):
        raise BenchmarkFailed(f"operations are missing in the log, which has answers to {log.answered}")
    return Left(told.digest[:16], log.weights, len(log.answered) - 1, round(told.seconds, 1), faults)


def _hash_of(directory: Path) -> str:
    """A hash of all files below it, whatever the order in which safetensors name their tensors."""
    digest = hashlib.sha256()
    for file in sorted(path for path in directory.rglob("*") if path.is_file()):
        digest.update((hash_of_tensors(file) or hashlib.sha256(file.read_bytes()).hexdigest()).encode())
    return digest.hexdigest()[:16]
