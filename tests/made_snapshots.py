"""Snapshots for tests: directories with an adapter of a tiny checkpoint, as PEFT writes them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from actors.models.adapted_layers import peft_targets
from actors.models.adapter import CONFIG_FILE, TENSOR_FILE, AdapterSpec, peft_config
from actors.rollout.engines.adapter_tensors import AdapterTensors


def write_adapter(
    directory: Path, base: Path, *, rank: int, targets: tuple[str, ...] = (), seed: int = 0, spread: float = 0.3
) -> Path:
    """Write an adapter with drawn weights, which moves probabilities clearly, to ``directory``; returns it."""
    import torch
    from safetensors.numpy import save_file
    from transformers import AutoConfig, AutoModelForCausalLM

    with torch.device("meta"):
        model: Any = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(base))
    spec, generator = AdapterSpec(rank=rank, alpha=2.0 * rank, targets=targets), np.random.default_rng(seed)
    expected = AdapterTensors.of_model(model, spec, "float32")
    scale = spread / np.sqrt(rank)
    tensors = {
        name: (scale * generator.standard_normal(shape)).astype(np.float32) for name, shape in expected.shapes.items()
    }
    modules, parameters = peft_targets(model, spec)
    directory.mkdir(parents=True, exist_ok=True)
    save_file(tensors, directory / TENSOR_FILE)
    (directory / CONFIG_FILE).write_text(peft_config(spec, base=base, modules=modules, parameters=parameters))
    return directory
