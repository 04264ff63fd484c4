"""Whether vLLM computes what it did after it has been given the weights that it has: asked of mixtures of experts.

    example prompts ─▶ log-probabilities ─▶ the same weights loaded again, from the model's files ─▶ the same?

Weights that are loaded into running expert layers come out wrong in some builds (vLLM 0.32 on a CPU packs them at the
start, and not again), silently. Versions that are adapters leave these layers alone and are not asked about. Several
ranks of one engine are not asked either; there, as everywhere, the trainer compares the first samples.
"""

# pyright: reportMissingImports=false
# vLLM is an optional extra.

from __future__ import annotations

from typing import Final

import numpy as np

from actors.protocol.work import SamplingParams
from actors.rollout.engine import EngineSpec
from actors.rollout.engines.vllm.core import VllmCore
from actors.rollout.engines.vllm.weights import fill
from actors.rollout.errors import ModelUnreadable

_PROMPTS, _PROMPT_TOKENS = 4, 12
_STEPS: Final = 16
_APART_MAX: Final = {"float32": 1e-3}
_APART_MAX_HALF: Final = 0.05
"""Nats. The same weights give the same bits; wrong ones were 0.1 and more apart."""


def check_reload(core: VllmCore, spec: EngineSpec) -> None:
    """Load the weights that ``core`` has once more, if it has experts, and see that nothing changes.

    Raises:
        ModelUnreadable: it computes something else afterwards.
    """
    if not core.model_config.is_moe:
        return
    from vllm.config import LoadConfig
    from vllm.model_executor.model_loader import get_model_loader

    before = _likeliest(core, "probe.0")
    loader = get_model_loader(LoadConfig(use_tqdm_on_load=False))
    fill(core.model, core.model_config, loader.get_all_weights(core.model_config, core.model))  # type: ignore[attr-defined]
    apart = float(np.abs(before - _likeliest(core, "probe.1")).max())
    if apart <= _APART_MAX.get(spec.dtype, _APART_MAX_HALF):  # False for NaN
        return
    raise ModelUnreadable(
        f"vLLM cannot follow the training of {spec.model_path}: given the weights of its experts that it has already, "
        f"it computes log-probabilities that are {apart:.2g} apart; set rollout.engine: torch"
    )


def _likeliest(core: VllmCore, salt: str) -> np.ndarray:
    """float32[prompts]: log-probability of the likeliest next token of each example prompt."""
    rng = np.random.default_rng(0)
    for number in range(_PROMPTS):
        core.submit(
            f"{salt}.{number}",
            rng.integers(0, core.vocabulary, _PROMPT_TOKENS).tolist(),
            SamplingParams(max_tokens=1, temperature=0.0),
            origin=(0, number),
            start=0,
            context=0,
            budget=1,
            salt=salt,
        )
    found: dict[str, float] = {}
    for _ in range(_STEPS):
        rows = core.step()
        found |= dict(zip(rows.core_ids, rows.logprobs.tolist(), strict=True))
        if len(found) == _PROMPTS:
            break
    return np.array([found.get(f"{salt}.{number}", np.nan) for number in range(_PROMPTS)], np.float32)
