"""Request ids, and who waits for their answers.

    <line>/<number>     the id of an operation's answer, the same in every life of the server

Invariants
- An id says all that is needed to find its answer in the log; nothing about it has to be remembered.
- A poll returns as soon as its answer is durable, or after ``limits.tinker_poll_s`` of the loop's time.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from actors.tinker.errors import Problem
from actors.tinker.operation_log import OperationLog
from actors.tinker.operations import Answer
from configs.limits import Limits


def request_id(line: str, seq: int) -> str:
    return f"{line}/{seq}"


def read_request_id(text: str) -> tuple[str, int]:
    """The line and the number of a request id.

    Raises:
        Problem: it is none.
    """
    line, _, number = text.rpartition("/")
    if not line or not (number.isascii() and number.isdecimal()) or len(number) > 19 or int(number) >= 1 << 63:
        raise Problem(400, f"request_id: {text[:200]!r} is no id of a request: use one that this server has answered")
    return line, int(number)


class Futures:
    """Lets polls wait for answers."""

    def __init__(self, log: OperationLog, limits: Limits) -> None:
        self._log, self._limits = log, limits
        self._polls: dict[tuple[str, int], set[asyncio.Event]] = {}

    def answered(self, line: str, seq: int) -> None:
        """Wake those who wait for this answer."""
        for event in self._polls.get((line, seq), ()):
            event.set()

    def ended(self, line: str) -> None:
        """Wake those who wait for any answer of a line that has ended."""
        for (other, _), events in self._polls.items():
            if other == line:
                for event in events:
                    event.set()

    async def poll(self, line: str, seq: int, goes_on: Callable[[], bool]) -> Answer | None:
        """The answer, as soon as there is one; None if there is none after ``limits.tinker_poll_s``.

        ``goes_on`` says whether an answer can still come: if not, None is returned at once.
        """
        event = asyncio.Event()
        polls = self._polls.setdefault((line, seq), set())
        polls.add(event)
        try:
            answer = await self._log.answer(line, seq)
            if answer is not None:
                return answer
            if goes_on():
                try:
                    async with asyncio.timeout(self._limits.tinker_poll_s):
                        await event.wait()
                except TimeoutError:
                    return None
            return await self._log.answer(line, seq)  # it may have come while the log was read
        finally:
            polls.discard(event)
            if not polls:
                self._polls.pop((line, seq), None)
