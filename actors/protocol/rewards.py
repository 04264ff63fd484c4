"""Prompts to read and responses to score. Whoever answers keeps no state; both are idempotent asks.

scheduler ──Score──▶ rewards ──Scored──▶ scheduler          job ──ReadPrompts──▶ prompts ──PromptsRead──▶ job
scheduler ──ShowSamples──▶ rewards ──Samples (``metrics.py``)──▶ metrics
"""

from __future__ import annotations

import msgspec
import numpy as np

from actors.core.message import Message, message


class Response(msgspec.Struct, frozen=True):
    """It is one finished response to score. ``finish`` is a FinishReason."""

    sibling: int
    token_ids: np.ndarray  # int32[n]
    finish: int


class PromptResponses(msgspec.Struct, frozen=True):
    prompt: int
    context: bytes
    """Context as the prompt source wrote it."""
    responses: list[Response]


@message("rewards.score")
class Score(Message):
    """The scheduler has responses scored. Reply: Scored. ``step`` is only for logs."""

    job: str
    step: int
    items: list[PromptResponses]


class Verdict(msgspec.Struct, frozen=True):
    """It is either a reward or a failure, never both; a failure is never a reward of 0."""

    prompt: int
    sibling: int
    reward: float | None
    failure_kind: str = ""
    """FailureKind, empty on success."""
    failure_message: str = ""
    parts: tuple[float, ...] = ()
    """Rewards that it is the weighted sum of, in the job file's order; none where there is one only."""


@message("rewards.scored")
class Scored(Message):
    verdicts: list[Verdict]


class SampleToShow(msgspec.Struct, frozen=True):
    """It is one sample of a committed step, chosen for people to read."""

    chosen: str
    """Reason of the choice: best, worst, random or dropped."""
    prompt: int
    sibling: int
    prompt_ids: np.ndarray  # int32[p]
    token_ids: np.ndarray  # int32[n]
    versions: np.ndarray  # int32[n]
    """Weight version of each token; below 0 it is the environment's (``actors/environments/turns.py``)."""
    finish: int
    reward: float | None
    reason: str
    """Reason why it was dropped; empty if it was trained."""
    context: bytes
    parts: list[float] = []
    """Rewards that it is the weighted sum of; none where there is one only, or no verdict."""


@message("rewards.show_samples")
class ShowSamples(Message):
    """The scheduler has some samples of a committed step decoded and sent to the job's metrics actor."""

    job: str
    step: int
    samples: list[SampleToShow]


@message("prompts.read")
class ReadPrompts(Message):
    """The job reads prompts. Reply: PromptsRead, a function of (data config, seed, ordinal): a restart repeats it.

    It is answered within about ``limits.read_slice_s``, with what has been found by then; the rest is asked for again.
    """

    job: str
    start: int
    count: int
    evaluation: bool = False
    """Whether it reads the prompts of the evaluation, which has ordinals of its own."""


class SourcedPrompt(msgspec.Struct, frozen=True):
    prompt: int
    token_ids: np.ndarray  # int32[n]
    text: str
    context: bytes
    """Context that says which row it is."""
    answer_tokens: int = -1
    """Length of the row's answer, in jobs whose steps are planned; -1: not counted, or there is none."""


@message("prompts.prompts_read")
class PromptsRead(Message):
    prompts: list[SourcedPrompt]
    exhausted: bool
    """Whether a finite data set with ``data.epochs`` set has ended."""
    rows: int = 0
    """Rows of the data set."""
    checked: int = 0
    """Rows known to have a prompt and what else the job needs of them; all are looked at before the first is used."""
    seen: int = 0
    """Rows of the first epoch that have been tokenised."""
    passed: dict[str, int] = msgspec.field(default_factory=dict)
    """Rows that are passed over, so far, by reason."""
    first: dict[str, str] = msgspec.field(default_factory=dict)
    """The first one of each reason, and what is wrong with it."""
    replaced: bool = False
    """Whether the run's earlier prompts came from other data at the same place."""
    overlap: int = 0
    """Prompts of the evaluation that are prompts of the training data, too."""
