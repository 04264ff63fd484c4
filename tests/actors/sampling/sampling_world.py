"""A sampler that runs, for the tests of this folder."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np

from actors.protocol.sampling import SampleRequest, SampleResult
from actors.rollout.engine import EngineSpec, RolloutEngine
from actors.sampling.sampler import SamplerSetup, SnapshotSampler
from configs.limits import Limits

CONTEXT_TOKENS = 96


async def inline(function: Callable[..., Any], *args: Any) -> Any:
    """Blocking work in a virtual world."""
    return function(*args)


def letters(tokens: Sequence[int]) -> str:
    """A text with one character a token."""
    return "".join(chr(97 + token % 26) for token in tokens)


@asynccontextmanager
async def sampling(
    kind: str = "simulated",
    model_path: Path = Path("none"),
    *,
    limits: Limits | None = None,
    make: Callable[[], RolloutEngine] | None = None,
    slots: int = 6,
    **options: Any,
) -> AsyncIterator[SnapshotSampler]:
    """A started sampler, closed at the end."""
    simulated = kind == "simulated"
    spec = EngineSpec(model_path=model_path, max_running=slots, max_context_tokens=CONTEXT_TOKENS, options=options)
    sampler = SnapshotSampler(
        SamplerSetup(engine=kind, spec=spec, end_tokens=(1,) if simulated else None),
        limits=limits or Limits(),
        run_blocking=inline,
        make=make,
        decode=letters if simulated else None,
    )
    await sampler.start()
    running = asyncio.create_task(sampler.run())
    try:
        yield sampler
    finally:
        await sampler.close()
        await asyncio.gather(running, return_exceptions=True)


def ask(snapshot: Path | None = None, *, ids: Sequence[int] = (5, 6, 7), **fields: Any) -> SampleRequest:
    given = {"seed": 7, "max_tokens": 8, "stop": ()} | fields
    return SampleRequest(prompt=np.array(ids, np.int32), snapshot=None if snapshot is None else str(snapshot), **given)


def said(result: SampleResult) -> list[tuple[str, list[int], list[float]]]:
    """All that a result says of its sequences, to be compared bit for bit."""
    return [(one.stop_reason, one.tokens.tolist(), one.logprobs.tolist()) for one in result.sequences]


def scores(result: SampleResult) -> list[list[float]]:
    assert result.prompt_logprobs is not None and result.top_prompt_logprobs is not None
    return [result.prompt_logprobs[1:].tolist(), result.top_prompt_logprobs[1:].ravel().tolist()]
