"""A low-rank adapter (LoRA, Hu et al. 2021): its settings, its tensors' names and its files.

    y = W x + (alpha / rank) · B A x        W frozen        A [rank, in], drawn        B [out, rank], zeros at first

A published version, a checkpoint and an engine name its tensors as PEFT does, so other programs load them:

    base_model.model.<layer>.lora_A.weight, base_model.model.<layer>.lora_B.weight

Experts whose weights are one tensor a layer have one A and one B as well, each with a part for each expert
(``adapted_layers.py``).

An adapter fits only the model that it was trained on, which is identified by a hash of its files.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import xxhash

from configs.adapter_schema import ALL_LINEAR, AdapterConfig

CONFIG_FILE: Final = "adapter_config.json"
TENSOR_FILE: Final = "adapter_model.safetensors"
NAME_PREFIX: Final = "base_model.model."
A: Final = "lora_A"
B: Final = "lora_B"
_READ_BYTES: Final = 4 << 20
_BASE_FILES: Final = ("config.json", "*.safetensors", "*.bin")


@dataclass(frozen=True, kw_only=True, slots=True)
class AdapterSpec:
    """Says which adapter a model has. ``targets``: ends of layers' names, ``all-linear`` for all but the output
    embedding; empty: ``all-linear``.
    """

    rank: int
    alpha: float
    targets: tuple[str, ...] = ()
    quantization: str = "none"
    """``nf4``: the linear layers of the model, which are rounded to it, are kept in 4 bits a number."""

    @property
    def scale(self) -> float:
        return self.alpha / self.rank

    @property
    def in_words(self) -> str:
        base = "" if self.quantization == "none" else f", beside a model in {self.quantization}"
        return f"rank {self.rank}, alpha {self.alpha:g}, targets {', '.join(self.targets) or ALL_LINEAR}{base}"


def adapter_spec(config: AdapterConfig | None) -> AdapterSpec | None:
    """The adapter of a job; None: the whole model is trained."""
    if config is None:
        return None
    targets = () if config.targets == ALL_LINEAR else tuple(config.targets)
    return AdapterSpec(rank=config.rank, alpha=config.alpha, targets=targets, quantization=config.quantization)


def tensor_names(layer: str) -> tuple[str, str]:
    """The names of a layer's A and B."""
    return f"{NAME_PREFIX}{layer}.{A}.weight", f"{NAME_PREFIX}{layer}.{B}.weight"


def layer_of(name: str) -> str:
    """The layer of a tensor; the inverse of ``tensor_names``."""
    return name.removeprefix(NAME_PREFIX).removesuffix(".weight").rpartition(".")[0]


def base_identity(directory: Path) -> str:
    """xxh3-128 of a model's configuration and weights; equal hashes mean the same model."""
    digest = xxhash.xxh3_128()
    for pattern in _BASE_FILES:
        for file in sorted(directory.glob(pattern)):
            digest.update(f"{file.name} {file.stat().st_size}\n".encode())
            with file.open("rb") as opened:
                while block := opened.read(_READ_BYTES):
                    digest.update(block)
    return digest.hexdigest()


def peft_config(spec: AdapterSpec, *, base: Path, modules: list[str], parameters: list[str]) -> str:
    """The text of ``adapter_config.json``, for an adapter of the model in ``base``: of the ``modules`` whose names end
    so, and of ``parameters`` that are no module's ``weight``, such as experts.
    """
    config: dict[str, Any] = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": str(base.resolve()),
        "r": spec.rank,
        "lora_alpha": spec.alpha,
        "target_modules": modules,
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
        "modules_to_save": None,
    }
    if parameters:
        config["target_parameters"] = parameters
    return json.dumps(config, indent=2) + "\n"
