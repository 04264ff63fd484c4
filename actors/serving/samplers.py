"""What answers the samples of clients: engines, in this process or in samplers' processes.

tinker server ─▶ EngineSampler ─▶ SampleRequest ─▶ SnapshotSampler (``actors/sampling``), or a SamplerFleet
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Final

import numpy as np

from actors.core.errors import AskError
from actors.protocol.sampling import SampleRequest, SampleResult
from actors.sampling.errors import BadSampleRequest, EngineLost, SamplerClosed, SnapshotUnusable
from actors.tinker.errors import LearnerLost, OperationRefused
from actors.tinker.sampling import Sampled, SampledSequence, SamplingParameters, TopTokens

_NOT_THERE: Final = -99999.0
"""Log-probability where there is none, as the client has it."""


class EngineSampler:
    """Implements the ``Sampler`` of the Tinker server. ``ask``: as ``SnapshotSampler.sample``."""

    def __init__(self, ask: Callable[[SampleRequest], Awaitable[SampleResult]]) -> None:
        self._ask = ask

    async def sample(
        self, snapshot: Path | None, prompt: np.ndarray, n: int, parameters: SamplingParameters, *,
        prompt_logprobs: bool, topk_prompt_logprobs: int,
    ) -> Sampled:  # fmt: skip
        wanted = parameters
        stop = None if wanted.stops_at_eos else (*wanted.stop_tokens, *wanted.stop_texts)
        request = SampleRequest(
            prompt=prompt,
            snapshot=None if snapshot is None else str(snapshot),
            samples=n,
            max_tokens=wanted.max_tokens,
            temperature=wanted.temperature,
            top_k=wanted.top_k,
            top_p=wanted.top_p,
            seed=wanted.seed,
            stop=stop,
            prompt_logprobs=prompt_logprobs,
            top_prompt_logprobs=topk_prompt_logprobs,
        )
        try:
            return _sampled(await self._ask(request))
        except (BadSampleRequest, SnapshotUnusable) as error:
            raise OperationRefused(str(error)) from error
        except (EngineLost, SamplerClosed, AskError) as error:
            raise LearnerLost(str(error)) from error


def _sampled(result: SampleResult) -> Sampled:
    top = None
    if result.top_prompt_ids is not None and result.top_prompt_logprobs is not None:
        top = TopTokens(
            tokens=np.maximum(result.top_prompt_ids, 0),
            logprobs=np.nan_to_num(result.top_prompt_logprobs, nan=_NOT_THERE),
        )
    sequences = [SampledSequence(one.stop_reason == "stop", one.tokens, one.logprobs) for one in result.sequences]
    return Sampled(sequences, result.prompt_logprobs, top)
