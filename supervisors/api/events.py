"""Events of a run as it goes on, for ``for`` and ``async for``; ``print`` shows each as the text below.

kind      fields                                       text
state     state                                        running
phase     phase, phase_done, phase_total, phase_unit   making the model: 300 of 900 steps
step      a row of metrics.jsonl                       step 4 (5 of 20)  reward 0.412  …
message   message                                      warning: …
waiting   waiting_for; empty: no longer waiting     waiting for …
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Self

from supervisors.api.loop_thread import submit
from supervisors.api.step_line import step_line


@dataclass(frozen=True)
class Event:
    """One thing that has happened in a run. ``print(event)`` shows its text."""

    kind: str
    fields: Mapping[str, Any]
    text: str = ""

    def __str__(self) -> str:
        return self.text


def step_event(row: Mapping[str, Any], steps: int | None) -> Event:
    """The event of a row of metrics.jsonl."""
    return Event("step", dict(row), step_line({**row, "step": int(row["step"]) + 1}, steps))


def state_event(state: str) -> Event:
    return Event("state", {"state": state}, state)


def heard_event(said: Mapping[str, Any]) -> Event | None:
    """The event of a message from a watch of the control socket, steps aside; None if it is of no use to a program."""
    fields = {name: value for name, value in said.items() if name not in ("kind", "job")}
    if fields.get("message"):
        return Event("message", fields, str(fields["message"]))
    if fields.get("state"):
        return Event("state", fields, str(fields["state"]))
    if fields.get("phase"):
        done = f"{fields.get('phase_done', 0)} of {fields.get('phase_total', 0)} {fields.get('phase_unit', '')}"
        return Event("phase", fields, f"{fields['phase']}: {done}".rstrip())
    if "waiting_for" in fields:
        return Event("waiting", fields, f"waiting for {fields['waiting_for'] or 'nothing any more'}")
    return None


class Events:
    """Iterates over a run's events, once, until it is over. An interrupted wait loses none of them."""

    def __init__(self, source: AsyncGenerator[Event, None]) -> None:
        self._source = source
        self._next: Future[Event | None] | None = None

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Event:
        event = self._begin().result()
        self._next = None
        if event is None:
            raise StopIteration
        return event

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Event:
        event = await asyncio.shield(asyncio.wrap_future(self._begin()))
        self._next = None
        if event is None:
            raise StopAsyncIteration
        return event

    def __del__(self) -> None:
        if self._next is not None:
            self._next.cancel()

    def _begin(self) -> Future[Event | None]:
        if self._next is None:
            self._next = submit(_next_of(self._source))
        return self._next


async def _next_of(source: AsyncGenerator[Event, None]) -> Event | None:
    return await anext(source, None)
