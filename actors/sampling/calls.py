"""One request on its way through the sampler: its sequences, as the engine makes them, and its answer.

Invariants
- A call has one answer: a result with all its sequences, or an error; what comes after it is ignored.
- The noise of a token is a function of (seed, prompt's tokens, number of the sequence, position), so nothing that runs
  beside a call changes its tokens.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final

import numpy as np
import xxhash
from numpy.typing import NDArray

from actors.protocol.sampling import SampledSequence, SampleRequest, SampleResult
from actors.protocol.tokens import FinishReason
from actors.protocol.work import SamplingParams
from actors.rollout.engine import GenerationRequest, PromptScores
from actors.sampling.snapshots import Snapshot
from actors.sampling.stop_texts import StopTexts

_NOTHING: Final = np.zeros(0, np.int32)


class RunningSequence:
    """Follows one sequence of a call. ``number``: that of its request to the engine."""

    def __init__(self, call: Call, number: int, stops: StopTexts | None) -> None:
        self.call, self.number = call, number
        self._stops = stops
        self._tokens: list[int] = []
        self._logprobs: list[float] = []
        self._tops: list[NDArray[np.void]] = []
        self.ended: SampledSequence | None = None

    def take(
        self, tokens: NDArray[np.int32], logprobs: NDArray[np.float32], finished: int, tops: NDArray[np.void] | None
    ) -> bool:
        """Add what the engine has made; what follows a stop text is dropped. Whether the sequence has ended."""
        if tops is not None and self.call.request.top_logprobs:
            self._tops.append(tops[:, : self.call.request.top_logprobs])
        for token, logprob in zip(tokens.tolist(), logprobs.tolist(), strict=True):
            self._tokens.append(token)
            self._logprobs.append(logprob)
            if self._stops is not None and self._stops.completed_by(token):
                self._end("stop")
                return True
        if finished:
            self._end("stop" if finished == FinishReason.STOP else "length")
        return bool(finished)

    def _end(self, reason: str) -> None:
        tops = np.concatenate(self._tops)[: len(self._tokens)] if self._tops else None
        self.ended = SampledSequence(
            stop_reason="stop" if reason == "stop" else "length",
            tokens=np.array(self._tokens, np.int32),
            logprobs=np.array(self._logprobs, np.float32),
            top_ids=None if tops is None else np.ascontiguousarray(tops["token"]),
            top_logprobs=None if tops is None else np.ascontiguousarray(tops["logprob"]),
        )


class Call:
    """Follows one request, from its arrival at ``since_s`` to its ``answer``."""

    def __init__(
        self,
        request: SampleRequest,
        snapshot: Snapshot,
        *,
        seed: int,
        stop_tokens: tuple[int, ...],
        stop_texts: Callable[[], StopTexts | None],
        context_tokens: int,
        since_s: float,
    ) -> None:
        """``stop_texts``: makes what watches one sequence; ``stop_tokens`` end all of them."""
        self.request, self.snapshot, self.since_s = request, snapshot, since_s
        self.prompt = np.ascontiguousarray(request.prompt, np.int32)
        self._prompt_name = xxhash.xxh3_64_intdigest(self.prompt.astype("<i4").tobytes()) >> 1
        self._stop_texts = stop_texts
        self._sampling = SamplingParams(
            max_tokens=min(request.max_tokens or context_tokens, context_tokens - len(self.prompt)),
            temperature=float(request.temperature),
            top_p=float(request.top_p),
            top_k=max(0, request.top_k),
            stop_token_ids=stop_tokens,
            seed=seed,
        )
        self.answer: asyncio.Future[SampleResult] = asyncio.get_running_loop().create_future()
        self.sequences: list[RunningSequence] = []
        """Sequences that the engine has got."""
        self.is_begun = False
        """Whether the engine has computed anything for it."""
        self.scores: PromptScores | None = None

    @property
    def needs_scores(self) -> bool:
        """Whether the prompt is still to be scored."""
        return self.scores is None and bool(self.request.prompt_logprobs or self.request.top_prompt_logprobs)

    @property
    def left(self) -> int:
        """Number of sequences that the engine has not got yet."""
        return self.request.samples - len(self.sequences)

    def begin_one(self, number: int, adapter: int) -> GenerationRequest:
        """The next sequence, as the engine is asked for it under ``number``; ``adapter``: the engine's number of it."""
        request = GenerationRequest(
            request=number,
            prompt=self._prompt_name,
            sibling=len(self.sequences),
            prompt_ids=self.prompt,
            generated=_NOTHING,
            sampling=self._sampling,
            adapter=adapter,
            top_logprobs=self.request.top_logprobs,
        )
        self.sequences.append(RunningSequence(self, number, self._stop_texts()))
        self.is_begun = True
        return request

    def fail(self, error: Exception) -> None:
        """Answer with ``error``, unless there is an answer."""
        if not self.answer.done():
            self.answer.set_exception(error)

    def answer_if_ended(self) -> bool:
        """Answer if all sequences have ended; whether that is so."""
        ended = [sequence.ended for sequence in self.sequences if sequence.ended is not None]
        if len(ended) < self.request.samples:
            return False
        scores, asked = self.scores, self.request
        if not self.answer.done():
            tops = scores if asked.top_prompt_logprobs else None
            self.answer.set_result(
                SampleResult(
                    sequences=ended,
                    prompt_logprobs=scores.logprobs if scores and asked.prompt_logprobs else None,
                    top_prompt_ids=tops and tops.top_ids,
                    top_prompt_logprobs=tops and tops.top_logprobs,
                )
            )
        return True
