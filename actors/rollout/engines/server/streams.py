"""Sequences that a server computes: some wait, each of the others has a stream.

    add ─▶ waiting ─ begin ─▶ running, at most ``max_running`` ─▶ tokens gather as they arrive, by a task each
              ▲                  │ take: what has arrived, to become rows
              └── withdraw ──────┘ close: its connection ends, and with it the server's work on it

Invariants
- What has arrived of a stream and was not taken is forgotten when the stream is closed, and computed anew.
- The first error of any stream is kept for the step that comes next.
- Noise is a function of (seed, prompt, sibling, position of the first token of the request).
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Final

from actors.protocol.tokens import FinishReason
from actors.rollout.engine import GenerationRequest
from actors.rollout.engines.server.client import Choice, ServerClient
from actors.rollout.errors import EngineError, ServerGone
from actors.rollout.sampling import stream_keys, uniforms
from transport.errors import HeadraceError

_FINISHED: Final = {"stop": FinishReason.STOP, "length": FinishReason.LENGTH}
_NO_LOGPROB: Final = -9999.0
"""What vLLM says where there is none."""
_TOGETHER_TOKENS: Final = 4
"""Tokens of a sequence that come together, but for its first and last ones: each event costs the server a millisecond
of processor, however many tokens it brings. What a move or a load loses are those that have not come."""
_LABELS: Final = "headrace-"


def label_of(life: str, load: int, policy_version: int) -> str:
    """The name that a server is told for one load of weights in one ``life`` of one worker."""
    return f"{_LABELS}{life}-{load}-v{policy_version}"


def other_weights(url: str, served: str, expected: str) -> HeadraceError:
    """The error for a server that serves weights labelled ``served``."""
    life = expected.rsplit("-", 2)[0]
    if served.startswith(_LABELS) and not served.startswith(life):
        return EngineError(
            f"the server at {url} was given weights by another worker (label {served!r}): each server is for one job "
            "alone, and for one address of its rollout.servers"
        )
    return ServerGone(
        f"the server at {url} serves weights labelled {served!r}, not {expected!r}: it was started again, or was given "
        "others. None of its tokens since then is used"
    )


@dataclass(eq=False, slots=True)
class Stream:
    """Holds one sequence that has not ended. ``tokens``: prompt and response, as far as they were taken."""

    request: GenerationRequest
    tokens: list[int]
    salt: str = ""
    """Part of the server's prefix cache that it uses; empty: that of the label under which it begins."""
    reader: asyncio.Task[None] | None = None
    arrived: list[int] = field(default_factory=list[int])
    logprobs: list[float] = field(default_factory=list[float])
    end: FinishReason = FinishReason.RUNNING

    @property
    def position(self) -> int:
        """Position of the token that comes next."""
        return self.request.first + len(self.tokens) - len(self.request.prompt_ids)

    def take(self) -> tuple[list[int], list[float], FinishReason]:
        """What has arrived since the last time: tokens, log-probabilities, and how the sequence ended, if it has."""
        taken = self.arrived, self.logprobs, self.end
        self.arrived, self.logprobs = [], []
        return taken


class Streams:
    """Reads the streams of one server's sequences.

    Args:
        context_tokens: tokens of prompt plus response, at most.
        life: makes the names of requests differ from those of other workers and lives.
        answer_s: longest silence before ``ask`` is called, which raises if the server is gone.
    """

    def __init__(
        self,
        client: ServerClient,
        *,
        max_running: int,
        context_tokens: int,
        life: str,
        answer_s: float,
        ask: Callable[[], Awaitable[None]],
    ) -> None:
        self._client, self._max_running, self._context_tokens = client, max_running, context_tokens
        self._life, self._answer_s, self._ask = life, answer_s, ask
        self._named = 0
        self.waiting: deque[Stream] = deque()
        self.running: dict[int, Stream] = {}
        self._some, self._now = asyncio.Event(), asyncio.Event()
        """Set when a token has arrived; when a step should end."""
        self._failure: HeadraceError | None = None

    def __iter__(self) -> Iterator[Stream]:
        yield from self.running.values()
        yield from self.waiting

    def add(self, request: GenerationRequest) -> None:
        self.waiting.append(Stream(request, [*request.prompt_ids.tolist(), *request.generated.tolist()]))

    def begin(self, label: str) -> int:
        """Open streams while there is room; returns the number of tokens with which their sequences begin."""
        begun = 0
        while self.waiting and len(self.running) < self._max_running:
            sequence = self.waiting.popleft()
            sequence.salt = sequence.salt or label
            begun += len(sequence.tokens)
            self.running[sequence.request.request] = sequence
            sequence.reader = asyncio.create_task(self._read(sequence, label), name="read a stream")
        return begun

    def remove(self, numbers: set[int]) -> list[Stream]:
        """Close the sequences of these requests for good, and return them."""
        gone = [sequence for sequence in self if sequence.request.request in numbers]
        for sequence in gone:
            self._close(sequence)
            self.running.pop(sequence.request.request, None)
        self.waiting = deque(sequence for sequence in self.waiting if sequence.request.request not in numbers)
        return gone

    async def withdraw(self) -> None:
        """Close all streams; their sequences wait in front of the others."""
        closing = [reader for sequence in self.running.values() if (reader := self._close(sequence)) is not None]
        self.waiting.extendleft(reversed(self.running.values()))
        self.running, self._failure = {}, None
        self._some.clear()
        self._now.clear()
        if closing:
            async with asyncio.timeout(self._answer_s):
                await asyncio.gather(*closing, return_exceptions=True)

    def _close(self, sequence: Stream) -> asyncio.Task[None] | None:
        reader, sequence.reader = sequence.reader, None
        if reader is not None:
            reader.cancel()
        sequence.take()
        sequence.end = FinishReason.RUNNING
        return reader

    # ------------------------------------------------------------ reading

    def _body(self, sequence: Stream) -> dict[str, Any]:
        request, sampling = sequence.request, sequence.request.sampling
        self._named += 1
        key = stream_keys(sampling.seed, request.prompt, request.sibling)
        return {
            "request_id": f"{self._life}-{request.request}-{self._named}",
            "token_ids": sequence.tokens,
            "cache_salt": sequence.salt,
            "sampling_params": {
                "max_tokens": min(request.end - sequence.position, self._context_tokens - len(sequence.tokens)),
                "temperature": sampling.temperature,
                "top_k": sampling.top_k,
                "top_p": sampling.top_p,
                "seed": int(uniforms(key, sequence.position)[0] * (1 << 52)),
                "stop_token_ids": list(sampling.stop_token_ids),
                "ignore_eos": True,
                "logprobs": 0,
                "detokenize": False,
                "stream_interval": _TOGETHER_TOKENS,
            },
        }

    async def _read(self, sequence: Stream, label: str) -> None:
        """Gather the tokens of one stream. An error is kept for the step."""
        url = self._client.url
        try:
            async for choice in self._client.generate(self._body(sequence)):
                self._arrived(sequence, choice, label)
            if sequence.end is FinishReason.RUNNING:
                self._fail(ServerGone(f"the server at {url} has ended a stream before its sequence"))
        except HeadraceError as error:
            self._fail(error)
        except Exception as error:  # noqa: BLE001 - a task's error would be lost
            self._fail(EngineError(f"a stream of the server at {url} cannot be read: {type(error).__name__}: {error}"))

    def _arrived(self, sequence: Stream, choice: Choice, label: str) -> None:
        url, said = self._client.url, choice.logprobs.content or [] if choice.logprobs is not None else []
        if [one.token_id for one in said] != choice.token_ids or any(one.logprob <= _NO_LOGPROB for one in said):
            raise EngineError(f"the server at {url} gives tokens {choice.token_ids[:8]} without log-probabilities")
        for span in choice.weight_versions or ():
            if span.version != label:
                raise other_weights(url, span.version, label)
        if choice.finish_reason is not None and choice.finish_reason not in _FINISHED:
            raise ServerGone(f"the server at {url} has ended a sequence with {choice.finish_reason!r}")
        sequence.arrived += choice.token_ids
        sequence.logprobs += [one.logprob for one in said]
        self._some.set()
        if choice.finish_reason is not None:
            sequence.end = _FINISHED[choice.finish_reason]
            self._now.set()

    def _fail(self, error: HeadraceError) -> None:
        self._failure = self._failure or error
        self.hurry()

    # ------------------------------------------------------------ steps

    def hurry(self) -> None:
        """End ``gather`` with what has arrived."""
        self._some.set()
        self._now.set()

    async def gather(self, seconds: float) -> None:
        """Wait for the first tokens, and then until a sequence ends or ``seconds`` are over, counted from now."""
        clock = asyncio.get_running_loop().time
        until_s = clock() + seconds
        while not await _set_within(self._some, self._answer_s):
            await self._ask()
        await _set_within(self._now, until_s - clock())

    def take(self) -> list[tuple[Stream, list[int], list[float], FinishReason]]:
        """Everything that has arrived.

        Raises:
            HeadraceError: a stream has failed.
        """
        self._some.clear()
        self._now.clear()
        if self._failure is not None:
            raise self._failure
        taken = [(sequence, *sequence.take()) for sequence in self.running.values() if sequence.arrived or sequence.end]
        for sequence, tokens, _, end in taken:
            sequence.tokens += tokens
            if end:
                del self.running[sequence.request.request]
        return taken


async def _set_within(event: asyncio.Event, seconds: float) -> bool:
    """Whether ``event`` is set by then."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(max(0.0, seconds)):
            await event.wait()
    return event.is_set()
