"""What a replay of the journal keeps: samples in their batches, each in one state, and complaints about them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from actors.protocol.episodes import EpisodeLimits
from actors.protocol.evaluations import name_of_batch

QUEUED, IN_FLIGHT, FINISHED, SCORED, GRANTED = "queued", "in flight", "finished", "scored", "granted"
WAITING = "waiting"
"""State of an episode between two turns."""
COMMITTED, DROPPED, EVALUATED = "committed", "dropped", "evaluated"
UNSETTLED = (QUEUED, IN_FLIGHT, WAITING, FINISHED, SCORED)
SETTLED = (COMMITTED, DROPPED, EVALUATED)


class Name(NamedTuple):
    """Identifies a sample. Prompts are ordinals of the job's prompt stream."""

    step: int
    prompt: int
    sibling: int

    def __str__(self) -> str:
        return f"{name_of_batch(self.step)} prompt {self.prompt} sibling {self.sibling}"


class Topic:
    """Topics of complaints; each checker reports those of its own."""

    SAMPLE = "sample"
    TOKENS = "tokens"
    STEP = "step"
    ASSIGNMENT = "assignment"


@dataclass(frozen=True)
class Complaint:
    """Names an event that does not fit. ``event`` counts the recorded events from 0."""

    topic: str
    event: int
    what: str
    name: Name | None = None
    step: int | None = None
    token_index: int | None = None
    worker: str | None = None


@dataclass(slots=True)
class Sample:
    """What the journal tells of one sample."""

    name: Name
    state: str = QUEUED
    tokens: list[int] = field(default_factory=list[int])
    versions: list[int] = field(default_factory=list[int])
    """Policy version of each token; below 0 for a token of the environment."""
    limit: int = 0
    """Position at which the sample, or its present turn, ends at the latest."""
    workers: list[str] = field(default_factory=list[str])
    """Workers that had the sample, in order; one entry for each hand-out."""
    assignment: int = -1
    reward: float | None = None
    reason: str = ""


@dataclass(slots=True)
class Batch:
    """Holds the samples of one step, in the order of their rows."""

    step: int
    group_size: int
    stop_ids: frozenset[int]
    max_tokens: int
    prompts: list[int]
    samples: list[Sample]
    episodes: EpisodeLimits | None


@dataclass(slots=True)
class Held:
    """Counts the samples that one worker holds."""

    now: int = 0
    most: int = 0
    most_at: int = 0
    """Number of the event with which the worker first held ``most``."""


Named = frozenset[tuple[int, int]]
"""(prompt, sibling) of the samples that a commit names."""
