"""A helper: a process of our own code that does one long task, and ends.

    run_helper ─▶ launched, with its order on stdin ─▶ looked at now and then ─┬─▶ it ends ──────▶ HelperEnd
                                                                               └─▶ time is over, or a look raises:
                                                                                   killed, with all that it has started

Invariants
- A helper that somebody else kills is started once more, in the time that is left: its work begins anew, or goes on.
- When ``run_helper`` returns or raises, also by being cancelled, nothing of the helper is left.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import structlog

from actors.host.helper_process import command
from configs.limits import Limits
from supervisors.machine.processes.process import Launch, ProcessExit, launch
from supervisors.machine.processes.process_log import last_lines
from supervisors.tree.restart_budget import ExitCause

logger = structlog.get_logger("headrace.helper")


@dataclass(frozen=True)
class HelperEnd:
    """How a helper has ended."""

    exit: ProcessExit
    log: Path
    lines: int

    @property
    def tail(self) -> str:
        """The last lines of its log."""
        return "\n".join(last_lines(self.log, self.lines))

    def __str__(self) -> str:
        return f"({self.exit}); last lines of {self.log}:\n{self.tail}"


async def run_helper(
    module: str,
    log: Path,
    limits: Limits,
    timeout_s: float,
    *,
    words: Sequence[str] = (),
    stdin: bytes = b"",
    look: Callable[[], None] | None = None,
    every_s: float | None = None,
) -> HelperEnd:
    """Run ``module`` to its end, and call ``look`` every ``every_s`` meanwhile; what it raises ends the helper.

    Raises:
        TimeoutError: it did not end within ``timeout_s``.
    """
    until_s = asyncio.get_running_loop().time() + timeout_s
    spec = Launch(command(module, *words), log, stdin=stdin)
    end = await _run_once(spec, limits, until_s, look, every_s)
    if end.exit.cause is ExitCause.KILLED:
        logger.warning("a helper was killed; it is started once more", module=module, end=str(end.exit))
        end = await _run_once(spec, limits, until_s, look, every_s)
    return end


async def _run_once(
    spec: Launch, limits: Limits, until_s: float, look: Callable[[], None] | None, every_s: float | None
) -> HelperEnd:
    child, loop = launch(spec), asyncio.get_running_loop()
    try:
        while True:
            left_s = until_s - loop.time()
            try:
                end = await child.wait(left_s if every_s is None else min(every_s, left_s))
                return HelperEnd(end, spec.log_path, limits.exit_log_lines)
            except TimeoutError:
                if loop.time() >= until_s:
                    raise
            if look is not None:
                look()
    finally:
        child.kill()
        await child.gone()
