"""What the metrics actor hears. It owns metrics.jsonl, events.jsonl, trace.json and the TensorBoard files."""

from __future__ import annotations

import msgspec

from actors.core.message import Message, message


class Span(msgspec.Struct, frozen=True, array_like=True):
    """One coloured bar on a track of the trace. Wall-clock seconds, for people only."""

    name: str
    """generate, idle, pull, train, publish, wait, score, checkpoint."""
    start_s: float
    end_s: float
    args: dict[str, float | int | str] = {}


@message("metrics.spans")
class Spans(Message):
    job: str
    track: str
    """The worker's or trainer's name."""
    spans: list[Span]


@message("metrics.step_row")
class StepRow(Message):
    """One line of metrics.jsonl."""

    job: str
    row: dict[str, float | int | str]


@message("metrics.event")
class Event(Message):
    """One line of events.jsonl: something that a person or a checker may ask about later."""

    job: str
    name: str
    fields: dict[str, float | int | str]


@message("metrics.flush")
class Flush(Message):
    """Reply: Flushed, once everything that the asker has told before is in the files."""

    job: str


@message("metrics.flushed")
class Flushed(Message):
    pass
