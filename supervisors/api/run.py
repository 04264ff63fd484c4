"""A run as a program sees it: its events, its results, and calls that steer it.

    its files (metrics.jsonl, samples.jsonl, events.jsonl)  ─┐
    its control socket, while it lives ──────────────────────┼─▶ Run ─▶ events, metrics, samples, status, result
    its process, if this program has started it ─────────────┘

Invariants
- ``events`` tells each step once, in order, whatever the watch of the control socket has missed: the rows are on disk.
- Reading needs no live run: where the files are here, they are read.
- A run that this program has started ends with the object, with its ``with`` block, and with the program, whatever the
  program has forked; a run that it is only connected to is left alone, and so is the program's run by its children.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self

from actors.control.client import ControlClient
from actors.control.errors import BadArgs, NotFound, NotSupported, TimedOut, Unreachable
from actors.control.socket import read_endpoint
from actors.control.verbs import VERBS
from actors.jobs.summary import read_rows
from actors.metrics.samples import of_step, read_samples
from actors.protocol.jobs import JobState
from configs.limits import DEFAULT_LIMITS
from configs.run_files import CONTROL_ENDPOINT, METRICS, SAMPLES
from supervisors.api.errors import RunFailed
from supervisors.api.events import Event, Events, heard_event, state_event, step_event
from supervisors.api.held_process import HeldProcess, Summary
from supervisors.api.loop_thread import block, submit
from supervisors.api.run_files import RunFiles
from supervisors.machine.run_directory import has_owner
from transport.zmq.security import NodeKeys

_FAILED: Final = ("failed", "crashed")
_ROWS_MAX: Final = 10_000
"""Most rows that one ``metrics`` request of the control protocol may ask for."""
_AWAY: Final = (Unreachable, TimedOut, NotFound, OSError)
"""Errors that a request meets while a run's head starts or restarts, and once it is gone."""

Row = dict[str, Any]


class Run:
    """A run, as ``start``, ``resume`` or ``connect`` return it. Methods that are no coroutines may block briefly."""

    def __init__(
        self,
        job: str,
        *,
        run_dir: Path | None = None,
        endpoint: str | None = None,
        keys: NodeKeys | None = None,
        process: HeldProcess | None = None,
    ) -> None:
        """``run_dir``: the run's directory, if it is on this machine; else the control ``endpoint`` is needed."""
        self.job = job
        self.run_dir = run_dir
        self._endpoint, self._keys, self._held = endpoint, keys, process
        self._files = RunFiles(run_dir) if run_dir is not None else None

    def __repr__(self) -> str:
        return f"<Run {self.job} in {self.run_dir or self._endpoint}>"

    @property
    def _process(self) -> HeldProcess | None:
        """The run's process, if this program has started it. A forked child of the program is only connected."""
        return self._held if self._held is not None and self._held.is_ours else None

    # ------------------------------------------------------------ looking

    def events(self) -> Events:
        """All steps since the first, then every event from now on; ends with the run.

        Raises, when it is iterated over:
            Unreachable: its files are elsewhere, and nobody answers at its endpoint.
        """
        return Events(self._follow())

    def metrics(self) -> list[Row]:
        """The rows of ``metrics.jsonl``, one a step, for ``pandas.DataFrame``; the newest, if the files are elsewhere.

        Raises:
            ControlError: its files are elsewhere, and it does not answer.
        """
        return block(self._rows())

    def samples(self, step: int | None = None) -> list[Row]:
        """Some samples of a step as text: the newest with samples that is not after ``step``. Empty before the first.

        Raises:
            NotSupported: its files are elsewhere.
        """
        if self.run_dir is None:
            raise NotSupported("samples are read from the run's files, which are on another machine", "Read them there")
        return of_step(read_samples(self.run_dir / SAMPLES), step)

    def status(self) -> Row:
        """State, step, steps, workers, reward and error, as ``headrace ctl jobs`` has them.

        Raises:
            ControlError: its files are elsewhere, and it does not answer.
        """
        return block(self._status())

    # ------------------------------------------------------------ waiting

    async def result(self) -> Summary:
        """Wait for the end; returns the summary of ``headrace run --json``. Cancelling this does not affect the run.

        Raises:
            RunFailed: the run has failed; the error holds the summary.
            Unreachable: its files are elsewhere, and it does not answer any more.
        """
        if self._process is not None:
            return self._judged(await asyncio.shield(asyncio.wrap_future(self._process.ended)))
        return self._judged(await asyncio.wrap_future(submit(self._until_over())))

    def wait(self, timeout_s: float | None = None) -> Summary:
        """Wait for the end, as ``result``, outside of coroutines. An interrupt ends the waiting, not the run.

        Raises:
            TimeoutError: it still runs after ``timeout_s``; without one, waiting is bounded by the run alone.
        """
        future = self._process.ended if self._process is not None else submit(self._until_over())
        try:
            return self._judged(future.result(timeout_s))
        finally:
            if self._process is None:
                future.cancel()

    # ------------------------------------------------------------ telling it something

    def cancel(self) -> None:
        """Have the run take a checkpoint and end, as by Ctrl-C; wait for that with ``wait`` or ``result``.

        Raises:
            ControlError: a run that this program has not started does not answer, or is over.
        """
        if self._process is not None:
            self._process.release()
        else:
            self.call("cancel")

    def call(self, op: str, **args: Any) -> Any:
        """Any verb of the control protocol: ``run.call("scale", workers=3)``.

        Raises:
            ControlError: it says no, or does not answer; the message says why.
        """
        kind = VERBS.get(op)
        if kind is not None and kind.streams:
            raise BadArgs(f"{op} is a stream of events", "Use run.events()")
        if kind is not None and "job" in kind.__struct_fields__ and op != "submit":
            args.setdefault("job", self.job)
        return block(self._ask(op, args))

    def close(self) -> None:
        """End the run after a checkpoint, if this program has started it; an interrupt meanwhile ends it at once."""
        process = self._process
        if process is None or process.ended.done():
            return
        process.release()
        try:
            process.ended.result(DEFAULT_LIMITS.held_end_s)
        except BaseException:
            self.kill()
            raise

    def kill(self) -> None:
        """End the run at once if this program has started it; ``resume`` goes on from its last checkpoint."""
        if self._process is not None:
            self._process.kill()
            self._process.ended.result(DEFAULT_LIMITS.kill_timeout_s)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await asyncio.to_thread(self.close)

    # ------------------------------------------------------------ on the thread with the loop

    async def _follow(self) -> AsyncGenerator[Event, None]:
        told, state, steps = 0, "", self._files.steps if self._files is not None else None
        while True:
            try:
                async with ControlClient(self._where(), keys=self._keys) as client:
                    async for said in client.watch({"job": self.job}):
                        kind = said.get("kind")
                        if kind == "step" and int(said["step"]) <= told:
                            continue
                        if kind in ("state", "lagged") or (kind == "step" and int(said["step"]) > told + 1):
                            for row in await self._rows_since(told):
                                told = int(row["step"]) + 1
                                yield step_event(row, steps)
                        if kind == "step" and int(said["step"]) > told:
                            told = int(said["step"])  # counts the steps that are done
                            row = {name: value for name, value in said.items() if name not in ("kind", "job")}
                            yield step_event(row | {"step": told - 1}, steps)
                        elif kind != "step" and (event := heard_event(said)) is not None:
                            if event.kind == "state" and state == event.text:
                                continue  # a watch begins with the state as it is
                            state = event.text if event.kind == "state" else state
                            yield event
            except _AWAY:
                if self._files is None:
                    raise
            if over := self._over(state):
                break
            await asyncio.sleep(DEFAULT_LIMITS.connect_retry_max_s)
        for row in await self._rows_since(told):
            yield step_event(row, steps)
        if over != state:
            yield state_event(over)

    def _over(self, told: str) -> str:
        """State in which the run ended, by what was ``told`` last, its process or its files; empty: it has not."""
        if told in [state for state in JobState if state.over]:
            return told
        if self._process is not None:
            return str(self._process.ended.result().get("state")) if self._process.ended.done() else ""
        if self._files is None or has_owner(self._files.run_dir):
            return ""
        return str(self._files.state(alive=False))

    async def _until_over(self) -> Summary:
        """Follow a run that this program has not started to its end; returns its summary, or its status."""
        async for _ in self._follow():
            pass
        if self._files is not None:
            return self._files.summary()
        return await self._status()

    def _judged(self, summary: Summary) -> Summary:
        if summary.get("state") in _FAILED:
            raise RunFailed(summary, repr(self))
        return summary

    async def _rows_since(self, step: int) -> list[Row]:
        return [row for row in await self._rows() if int(row["step"]) >= step]

    async def _rows(self) -> list[Row]:
        if self.run_dir is not None:
            return list(read_rows(self.run_dir / METRICS))
        return list(await self._ask("metrics", {"job": self.job, "last": _ROWS_MAX}))

    async def _status(self) -> Row:
        try:
            found = [row for row in await self._ask("jobs", {}) if row["job"] == self.job]
        except _AWAY as error:
            if self._files is None:
                raise
            found = self._from_files()
            if not found:
                raise NotFound(f"{self!r} has not begun yet") from error
        if not found:
            raise NotFound(f"there is no job {self.job!r} at {self._where()}")
        return found[0]

    def _from_files(self) -> list[Row]:
        assert self._files is not None
        (row,) = self._files.jobs()
        lives = has_owner(self._files.run_dir) if self._process is None else not self._process.ended.done()
        return [row | {"state": "starting"}] if lives else [row]

    async def _ask(self, op: str, args: dict[str, Any]) -> Any:
        async with ControlClient(self._where(), keys=self._keys) as client:
            return await client.call(op, args)

    def _where(self) -> str:
        """The run's present endpoint: a resumed run has another one. A head of many jobs keeps it one folder up.

        Raises:
            Unreachable: the run has stored none yet.
        """
        if self._endpoint is not None or self.run_dir is None:
            return self._endpoint or ""
        places = (self.run_dir, self.run_dir.parent)
        place = next((place for place in places if (place / CONTROL_ENDPOINT).is_file()), None)
        if place is None:
            raise Unreachable(f"{self!r} has no control socket", "It may not have begun yet")
        return read_endpoint(str(place))
