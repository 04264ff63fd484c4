"""Checks of generation requests that every engine kind shares."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from actors.protocol.tokens import FinishReason
from actors.rollout.engine import GenerationRequest
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


def ended_before_start(request: GenerationRequest, max_context_tokens: int) -> FinishReason | None:
    """Why a request needs no computing: what the ledger holds already ends it, or it can never fit."""
    known = len(request.generated)
    if known and not request.limit and int(request.generated[-1]) in request.sampling.stop_token_ids:
        return FinishReason.STOP  # of a turn the last token may be the environment's; turns that ended do not come here
    if request.position >= request.end or len(request.prompt_ids) + known >= max_context_tokens:
        return FinishReason.LENGTH
    return None
