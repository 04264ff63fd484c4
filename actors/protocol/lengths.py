"""What the ranker hears and says, all of it by tell: nobody waits for it, and a lost message only costs scores.

    scheduler ──ScorePrompts──▶ ranker ──LengthScores──▶ scheduler        a batch was issued
    scheduler ──ObserveLengths─▶ ranker                                   a batch was committed

Prompts travel end to end in columns: prompt i owns the next ``prompt_lengths[i]`` entries of ``prompt_ids``.
"""

from __future__ import annotations

import numpy as np

from actors.core.message import Message, message


@message("ranker.score_prompts")
class ScorePrompts(Message):
    """The scheduler asks how long the responses to these prompts will be. ``keys`` name prompts by their tokens."""

    job: str
    step: int
    keys: np.ndarray  # uint64[p]
    prompt_lengths: np.ndarray  # int32[p]
    prompt_ids: np.ndarray  # int32[sum(prompt_lengths)]


@message("ranker.observe_lengths")
class ObserveLengths(Message):
    """The scheduler tells how long the responses have been: the mean over each prompt's samples."""

    job: str
    step: int
    keys: np.ndarray  # uint64[p]
    prompt_lengths: np.ndarray  # int32[p]
    prompt_ids: np.ndarray  # int32[sum(prompt_lengths)]
    response_tokens: np.ndarray  # float64[p]


@message("scheduler.length_scores")
class LengthScores(Message):
    """The ranker tells how long it expects the responses to be, as of its ``refresh``-th fine-tuning."""

    job: str
    refresh: int
    keys: np.ndarray  # uint64[p]
    scores: np.ndarray  # float64[p], tokens
