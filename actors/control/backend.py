"""What stands behind the control socket. ``supervisors`` implements it; tests bring their own.

Invariants
- Arguments have been checked for type and range. ``job`` None means the only job there is.
- Results are plain values: maps with text keys, lists, text, numbers, booleans, None. They are what a client sees.
- A method says no with an error of ``actors/control/errors.py``; anything else it raises is reported as our bug.
- Every call has a deadline, kept by the server: a method may be cancelled at any await.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import Any, Protocol

Plain = dict[str, Any]


class ControlBackend(Protocol):
    """Is the running system, as its operator sees it."""

    async def submit(self, job: Plain) -> Plain:
        """Check and start a job; ``job`` is a job file's content. Returns at least ``{job, run_dir}``.

        Raises:
            BadConfig: the job file is wrong; the message is ConfigError's.
        """
        ...

    async def jobs(self) -> list[Plain]:
        """Every job: at least ``{job, state, step, steps, run_dir}``."""
        ...

    def watch(self, job: str | None) -> AsyncGenerator[Plain, None]:
        """Events, each with at least ``kind``; ends when the job does. None: of all jobs, for as long as we live."""
        ...

    async def pause(self, job: str | None) -> Plain: ...
    async def resume(self, job: str | None) -> Plain: ...
    async def cancel(self, job: str | None) -> Plain: ...

    async def scale(self, job: str | None, workers: int) -> Plain:
        """Returns at least ``{job, workers}``, the new target."""
        ...

    async def drain(self, target: str) -> Plain:
        """``target`` is a node's or a worker's name. Returns when it takes no more work."""
        ...

    async def undrain(self, target: str) -> Plain:
        """``target`` is a node's or a training service's name. It gets work again."""
        ...

    async def services(self) -> list[Plain]:
        """Each training service: at least ``{service, state, jobs, holder, bubble, saving}``."""
        ...

    async def queue(self) -> list[Plain]:
        """Each job that waits for a service: at least ``{job, service, why}``, in the order of submission."""
        ...

    async def service_add(self, service: Plain) -> Plain:
        """Returns at least ``{service, state}``.

        Raises:
            BadConfig: it is no entry of a services file; the message is ConfigError's.
        """
        ...

    async def service_drain(self, service: str) -> Plain: ...
    async def service_remove(self, service: str) -> Plain: ...

    async def tree(self, job: str | None) -> list[Plain]:
        """Each actor: ``{name, role, node, pid, state, incarnation, restarts}``; a parent comes before its children."""
        ...

    async def nodes(self) -> list[Plain]:
        """Each machine: ``{node, kind, state, slots, slots_used, devices, free, given}``; ``given``: who has which."""
        ...

    async def stalls(self, longer_than_s: float) -> list[Plain]:
        """Each wait: ``{process, waiter, waits_for, kind, what, since_s}``, oldest first."""
        ...

    async def dead_letters(self) -> Plain:
        """``counts``: {process, reason, messages} each; ``newest``: {process, reason, tag, source, target, ago_s}."""
        ...

    async def metrics(self, job: str | None, last: int) -> list[Plain]:
        """The newest ``last`` rows of metrics.jsonl, oldest first."""
        ...

    async def logs(self, job: str | None, actor: str | None, lines: int) -> list[str]:
        """The newest ``lines`` lines, oldest first."""
        ...

    async def inject(self, job: str | None, fault: Plain) -> Plain:
        """Commit one fault now. Returns at least ``{job, kind, hit}``: a list of what was hit, for people.

        Raises:
            BadConfig: the fault does not fit the vocabulary; the message is ConfigError's.
        """
        ...

    async def checkpoint(self, job: str | None) -> Plain:
        """Returns at least ``{job, step, path}`` once it is durable."""
        ...
