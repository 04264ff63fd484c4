"""What a replay of the journal follows: samples in their batches, each in one state, and what was wrong with them."""

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
    """A name identifies a sample. Prompts are ordinals of the job's prompt stream."""

    step: int
    prompt: int
    sibling: int

    def __str__(self) -> str:
        return f"{name_of_batch(self.step)} prompt {self.prompt} sibling {self.sibling}"


class Topic:
    """A topic says what a complaint is about; each checker reports its own."""

    SAMPLE = "sample"
    TOKENS = "tokens"
    STEP = "step"
    ASSIGNMENT = "assignment"


@dataclass(frozen=True)
class Complaint:
    """A complaint names an event that does not fit. ``event`` counts the recorded events from 0."""

    topic: str
    event: int
    what: str
    name: Name | None = None
    step: int | None = None
    token_index: int | None = None
    worker: str | None = None


@dataclass(slots=True)
class Sample:
    """A sample is followed here as far as the journal tells of it."""

    name: Name
    state: str = QUEUED
    tokens: list[int] = field(default_factory=list[int])
    versions: list[int] = field(default_factory=list[int])
    """The policy version of each token; below 0 an environment has written it."""
    limit: int = 0
    """Position at which it ends at the latest, or its present turn."""
    workers: list[str] = field(default_factory=list[str])
    """Workers that had it, in order; one entry for each hand-out."""
    assignment: int = -1
    reward: float | None = None
    reason: str = ""


@dataclass(slots=True)
class Batch:
    """A batch holds the samples of one step, in the order of their rows."""

    step: int
    group_size: int
    stop_ids: frozenset[int]
    max_tokens: int
    prompts: list[int]
    samples: list[Sample]
    episodes: EpisodeLimits | None


@dataclass(slots=True)
class Held:
    """This counts the samples that one worker holds."""

    now: int = 0
    most: int = 0
    most_at: int = 0
    """Number of the event with which it first held ``most``."""


Named = frozenset[tuple[int, int]]
"""(prompt, sibling) of the samples that a commit names."""
