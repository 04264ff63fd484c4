"""One model family, made tiny: does the torch engine sample the policy that the torch backend trains?

config ─▶ random weights ─▶ engine: sampled responses with their log-probabilities
                        └─▶ trainer: the same tokens, as rows and packed, with and without gradient checkpointing
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch

from actors.protocol.work import SamplingParams
from actors.rollout.engine import EngineSpec, GenerationRequest, StepOutput
from actors.rollout.engines.torch.torch_engine import TorchEngine
from actors.trainer.backend import BackendSpec, MicroBatch
from actors.trainer.backends.torch.causal_lm import ResponseLogits, load_model, response_positions
from actors.trainer.learning.samples import TrainSample, pad
from transport.errors import HeadraceError

VOCABULARY: Final = 96
PROMPT_TOKENS: Final = (5, 9, 23, 40)
SIBLINGS: Final = 3
RESPONSE_TOKENS: Final = 24
STEPS_MAX: Final = 4 * RESPONSE_TOKENS
"""Number of engine steps at most; each gives every sequence a token."""
SIZES: Final[Mapping[str, Any]] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
}
TOKENS: Final[Mapping[str, Any]] = {"eos_token_id": 1, "pad_token_id": 0, "bos_token_id": 2}
WEIGHTS: Final = 10.0
"""Random weights are this much wider than a fresh model's, so that attention and positions matter."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Apart:
    """Says how far trainer and engine are apart: the largest difference of a token's log-probability, in nats."""

    plain: float = 0.0
    checkpointed: float = 0.0
    refused: str = ""
    """Reason for which the family cannot be run, or be checkpointed."""

    @property
    def worst(self) -> float:
        return max(self.plain, self.checkpointed)


def make_model(family: str, special: Mapping[str, Any], directory: Path) -> None:
    """Write a tiny random model of ``family`` to ``directory``."""
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    config = AutoConfig.for_model(family, **{**SIZES, **TOKENS, **special})
    model: Any = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(WEIGHTS)
    model.save_pretrained(directory)


def measure_family(family: str, special: Mapping[str, Any], directory: Path) -> Apart:
    """Make, sample, compare. What is refused is refused with the product's own words."""
    make_model(family, special, directory)
    try:
        samples = asyncio.run(_sampled(directory))
        batch = pad(samples)
        plain = _apart(batch, directory, checkpointed=False)
    except HeadraceError as error:
        return Apart(refused=str(error))
    try:
        return Apart(plain=plain, checkpointed=_apart(batch, directory, checkpointed=True))
    except HeadraceError as error:
        return Apart(plain=plain, refused=str(error))


async def _sampled(directory: Path) -> list[TrainSample]:
    """Responses of the engine to random prompts of several lengths, of a few siblings each."""
    rng = np.random.default_rng(7)
    prompts = [rng.integers(3, VOCABULARY, length).astype(np.int32) for length in PROMPT_TOKENS]
    sampling = SamplingParams(max_tokens=RESPONSE_TOKENS, temperature=1.0, stop_token_ids=(1,), seed=3)
    requests = [
        GenerationRequest(
            request=number,
            prompt=number // SIBLINGS,
            sibling=number % SIBLINGS,
            prompt_ids=prompts[number // SIBLINGS],
            generated=np.empty(0, np.int32),
            sampling=sampling,
        )
        for number in range(len(prompts) * SIBLINGS)
    ]
    engine, outputs = TorchEngine(), list[StepOutput]()
    spec = EngineSpec(model_path=directory, max_running=16, max_context_tokens=96, options={"tokens_per_step": 1})
    try:
        await engine.start(spec)
        engine.add(requests[::2])
        outputs.append(await engine.step())
        engine.add(requests[1::2])  # they join rows that have begun
        while engine.has_work and len(outputs) < STEPS_MAX:
            outputs.append(await engine.step())
    finally:
        await engine.close()
    tokens: dict[int, list[int]] = {}
    logprobs: dict[int, list[float]] = {}
    for output in outputs:
        start = 0
        for request, count in zip(output.requests.tolist(), output.counts.tolist(), strict=True):
            tokens.setdefault(request, []).extend(output.tokens[start : start + count].tolist())
            logprobs.setdefault(request, []).extend(output.logprobs[start : start + count].tolist())
            start += count
    return [
        TrainSample(
            prompt=request.prompt,
            sibling=request.sibling,
            prompt_ids=request.prompt_ids,
            tokens=np.array(tokens[request.request], np.int32),
            logprobs=np.array(logprobs[request.request], np.float32),
            stale=np.zeros(len(tokens[request.request]), np.bool_),
            advantage=1.0,
        )
        for request in requests
    ]


def _apart(batch: MicroBatch, directory: Path, *, checkpointed: bool) -> float:
    """The largest difference, in the layouts that the model obeys; the backward pass has to work too."""
    model = load_model(directory, BackendSpec(model_path=directory, recompute="whole" if checkpointed else "none"))
    logits = ResponseLogits(model, "cpu")
    where = response_positions(batch)
    worst = 0.0
    for packed in (True, False) if logits.may_pack else (False,):
        logits.may_pack = packed
        logprobs = logits(batch, where).logprobs(1.0)[0]
        logprobs.sum().backward()
        apart = np.abs(logprobs.detach().numpy() - batch.behaviour_logprobs[where])
        worst = max(worst, float(apart.max()) if np.isfinite(apart).all() else float("inf"))
    return worst
