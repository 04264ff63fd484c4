"""Checks of added requests that all engine kinds share: some are refused, some end at once, the rest is computed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from actors.protocol.tokens import FinishReason
from actors.rollout.engine import GenerationRequest
from actors.rollout.engines.step_columns import StepColumns
from actors.rollout.errors import RequestRefused


def check_requests(requests: Sequence[GenerationRequest], *, vocab: int) -> None:
    """Refuse what no engine can process.

    Raises:
        RequestRefused: an empty prompt, or a token id outside 0 … ``vocab`` - 1; names every culprit.
    """
    problems: dict[int, str] = {}
    for request in requests:
        if len(request.prompt_ids) == 0:
            problems[request.request] = f"prompt {request.prompt} has no tokens: expected at least one"
        elif (bad := _outside(request.prompt_ids, vocab)) is not None or (
            bad := _outside(request.generated, vocab)
        ) is not None:
            problems[request.request] = (
                f"prompt {request.prompt} holds token id {bad}: the model's vocabulary is 0 … {vocab - 1}"
            )
    if problems:
        raise RequestRefused(next(iter(problems.values())), tuple(problems))


def _outside(ids: NDArray[np.int32], vocab: int) -> int | None:
    bad = ids[(ids < 0) | (ids >= vocab)] if len(ids) else ids
    return int(bad[0]) if len(bad) else None


def to_compute(
    requests: Sequence[GenerationRequest], max_context_tokens: int, columns: StepColumns
) -> Iterator[GenerationRequest]:
    """Yield those of ``requests`` that are to be computed; the others end in ``columns``.

    A request ends at once if the tokens that it comes with end it already, or if it can never fit.
    """
    for request in requests:
        if (reason := _ended_before_start(request, max_context_tokens)) is None:
            yield request
        else:
            columns.end(request.request, request.position, reason)


def _ended_before_start(request: GenerationRequest, max_context_tokens: int) -> FinishReason | None:
    known = len(request.generated)
    if known and not request.limit and int(request.generated[-1]) in request.sampling.stop_token_ids:
        return FinishReason.STOP  # not for turns of an episode, whose last token may be the environment's
    if request.position >= request.end or len(request.prompt_ids) + known >= max_context_tokens:
        return FinishReason.LENGTH
    return None
