"""One thread that changes a SQLite file, many changes in one transaction.

    run(change) ─▶ waiting ─┐
    run(change) ─▶ waiting ─┼─▶ one transaction on the writer's thread ─▶ on the disk ─▶ each caller has its result
    run(change) ─▶ waiting ─┘

Invariants
- A caller has its result only after the transaction is on the disk, also through a power cut (``synchronous=FULL``).
- A change that raises is undone alone. If the file cannot be written, all callers have LogFailed, now and later.
- Under virtual time there is no thread: a change is made at once, between two points at which the process may die.
"""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

from actors.tinker.errors import LogFailed

T = TypeVar("T")
Change = Callable[[sqlite3.Connection], T]


class LogWriter:
    """Owns the connection to one SQLite file, in WAL mode."""

    def __init__(self, path: Path, limit_s: float) -> None:
        """Raises sqlite3.DatabaseError: it is no such file, or is damaged."""
        self._path, self._limit_s = path, limit_s
        self._db = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
        self._db.execute("PRAGMA journal_mode=WAL")
        self._db.execute("PRAGMA synchronous=FULL")
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="tinker-log")
        self._waiting: list[tuple[Change[Any], asyncio.Future[Any]]] = []
        self._writes = False
        self.failure: LogFailed | None = None

    async def run(self, change: Change[T]) -> T:
        """The result of ``change``, once what it has changed is on the disk.

        Raises:
            LogFailed: the disk refused, or did not confirm in time.
        """
        if self.failure is not None:
            raise self.failure
        loop = asyncio.get_running_loop()
        if getattr(loop, "virtual_time", False):
            await asyncio.sleep(0)
            result, error = self._transact([change])[0]
            await asyncio.sleep(0)
            if error is not None:
                raise error
            return result
        future: asyncio.Future[T] = loop.create_future()
        self._waiting.append((change, future))
        self._pump(loop)
        try:
            async with asyncio.timeout(self._limit_s):
                return await asyncio.shield(future)  # a caller that leaves must not undo the others' changes
        except TimeoutError as late:
            self.failure = LogFailed(f"{self._path}: the disk did not confirm within {self._limit_s:g} s")
            raise self.failure from late

    def run_now(self, change: Change[T]) -> T:
        """Do as ``run``, at once, before anybody else uses the log. Blocks."""
        result, error = self._transact([change])[0]
        if error is not None:
            raise error
        return result

    def close(self) -> None:
        """Write what waits, and close the file. Blocks."""
        waiting, self._waiting = self._waiting, []
        self._thread.submit(self._last, [change for change, _ in waiting])
        self._thread.shutdown(wait=True)

    def _last(self, changes: list[Change[Any]]) -> None:
        try:
            if changes and self.failure is None:
                self._transact(changes)
        finally:
            self._db.close()

    def _pump(self, loop: asyncio.AbstractEventLoop) -> None:
        if self._writes or not self._waiting:
            return
        batch, self._waiting = self._waiting, []
        self._writes = True
        written = loop.run_in_executor(self._thread, self._transact, [change for change, _ in batch])
        written.add_done_callback(lambda done: self._written(loop, batch, done))

    def _written(
        self,
        loop: asyncio.AbstractEventLoop,
        batch: list[tuple[Change[Any], asyncio.Future[Any]]],
        done: asyncio.Future[list[tuple[Any, BaseException | None]]],
    ) -> None:
        self._writes = False
        failure = done.exception() if not done.cancelled() else LogFailed("the log was closed")
        results = [(None, failure)] * len(batch) if failure is not None else done.result()
        for (_, future), (result, error) in zip(batch, results, strict=True):
            if future.done():
                continue
            if error is None:
                future.set_result(result)
            else:
                future.set_exception(error)
                future.exception()  # its caller may have left
        self._pump(loop)

    def _transact(self, changes: list[Change[Any]]) -> list[tuple[Any, BaseException | None]]:
        if self.failure is not None:
            raise self.failure
        results: list[tuple[Any, BaseException | None]] = []
        try:
            self._db.execute("BEGIN IMMEDIATE")
            results += [self._one(change) for change in changes]
            self._db.execute("COMMIT")
        except sqlite3.Error as error:
            self.failure = LogFailed(f"{self._path} cannot be written: {error}")
            raise self.failure from error
        return results

    def _one(self, change: Change[Any]) -> tuple[Any, BaseException | None]:
        self._db.execute("SAVEPOINT one")
        try:
            result = change(self._db)
        except sqlite3.Error:
            raise
        except Exception as error:  # noqa: BLE001  its caller has it; the other changes of the transaction stand
            self._db.execute("ROLLBACK TO one")
            self._db.execute("RELEASE one")
            return None, error
        self._db.execute("RELEASE one")
        return result, None
