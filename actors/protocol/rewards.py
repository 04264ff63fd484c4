"""Prompts to read and responses to score: idempotent questions to actors that keep no state.

scheduler ──Score──▶ rewards ──Scored──▶ scheduler          job ──ReadPrompts──▶ prompts ──PromptsRead──▶ job
scheduler ──ShowSamples──▶ rewards ──Samples (``metrics.py``)──▶ metrics
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec
import numpy as np

from actors.core.message import Message, message


class Response(msgspec.Struct, frozen=True):
    """Holds one finished response to score. ``finish`` is a FinishReason."""

    sibling: int
    token_ids: np.ndarray  # int32[n]
    finish: int


class PromptResponses(msgspec.Struct, frozen=True):
    prompt: int
    context: bytes
    """Context of the prompt, as in SourcedPrompt."""
    responses: list[Response]


@message("rewards.score")
class Score(Message):
    """The scheduler has responses scored. Reply: Scored. ``step`` is only for logs."""

    job: str
    step: int
    items: list[PromptResponses]


class Verdict(msgspec.Struct, frozen=True):
    """Holds either a reward or a failure, never both; a failure is never a reward of 0."""

    prompt: int
    sibling: int
    reward: float | None
    failure_kind: str = ""
    """Kind of the failure, a FailureKind; empty on success."""
    failure_message: str = ""
    parts: tuple[float, ...] = ()
    """Rewards that ``reward`` is the weighted sum of, in the job file's order; empty if there is only one."""


@message("rewards.scored")
class Scored(Message):
    verdicts: list[Verdict]


def beyond_limit(rewards: Iterable[float], limit: float) -> str:
    """What is wrong with the first of ``rewards`` whose magnitude is above ``limit``, for people; empty: none is.

    Far beyond it, a group's mean and spread are no numbers any more, and each of its updates would be skipped.
    """
    found = next((reward for reward in rewards if abs(reward) > limit), None)
    if found is None:
        return ""
    return f"the reward {found:g}, which is beyond reward.limit {limit:g}: scale rewards down, or raise the limit"


class SampleToShow(msgspec.Struct, frozen=True):
    """Holds one sample of a committed step, chosen for people to read."""

    chosen: str
    """Reason of the choice: best, worst, random or dropped."""
    prompt: int
    sibling: int
    prompt_ids: np.ndarray  # int32[p]
    token_ids: np.ndarray  # int32[n]
    versions: np.ndarray  # int32[n]
    """Policy version of each token, below 0 for an environment's (``scoring/reward_worker.py``)."""
    finish: int
    reward: float | None
    reason: str
    """Reason why the sample was dropped; empty if it was trained."""
    context: bytes
    parts: list[float] = []
    """Rewards that ``reward`` is the weighted sum of; empty if there is only one, or no verdict."""


@message("rewards.show_samples")
class ShowSamples(Message):
    """The scheduler has some samples of a committed step decoded and sent to the job's metrics actor."""

    job: str
    step: int
    samples: list[SampleToShow]


@message("prompts.read")
class ReadPrompts(Message):
    """The job reads prompts. Reply: PromptsRead, a function of (data config, seed, ordinal): a restart repeats it.

    The answer comes within about ``limits.read_slice_s``, with what was found by then; the job asks again for the rest.
    """

    job: str
    start: int
    count: int
    evaluation: bool = False
    """Whether to read the prompts of the evaluation, which has ordinals of its own."""


class SourcedPrompt(msgspec.Struct, frozen=True):
    """Holds one prompt, tokenised. ``context`` is a MessagePack map, opaque to all but the reward worker."""

    prompt: int
    token_ids: np.ndarray  # int32[n]
    text: str
    context: bytes
    """Row of the data, as the prompt source encoded it."""
    answer_tokens: int = -1
    """Length of the row's answer, used to plan steps; -1: it was not counted. The journal does not keep it."""


@message("prompts.prompts_read")
class PromptsRead(Message):
    prompts: list[SourcedPrompt]
    exhausted: bool
    """Whether a finite data set with ``data.epochs`` set has ended."""
    rows: int = 0
    """Number of rows of the data set."""
    checked: int = 0
    """Number of rows known to have all that the job needs of them; all are looked at before the first is used."""
    seen: int = 0
    """Number of rows of the first epoch that have been tokenised."""
    passed: dict[str, int] = msgspec.field(default_factory=dict)
    """Numbers of rows that have been passed over so far, by reason."""
    first: dict[str, str] = msgspec.field(default_factory=dict)
    """First row that was passed over, and what is wrong with it, by reason."""
    replaced: bool = False
    """Whether the run's earlier prompts came from other data at the same place."""
    overlap: int = 0
    """Number of prompts of the evaluation that are prompts of the training data, too."""
