"""Merges an adapter into a whole model: every W of its layers becomes W + scale · B A, the rest is the base's.

An output embedding with an adapter is no longer tied to the input embedding.

    CHECKPOINT (adapter_config.json) ─ names, with its hash ─▶ base ─▶ OUT.partial ── renamed, once whole ──▶ OUT

The sum is computed in float32, and rounded once to the base's own dtype.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any, Final

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from actors.models.adapted_layers import chosen, expert_weights, linear_layers, output_embedding, placed, untie
from actors.models.adapter import CONFIG_FILE, TENSOR_FILE, A, base_identity, layer_of, tensor_names
from actors.models.model_errors import brief, passes
from actors.models.whole_model import load_whole
from actors.trainer import checkpoint as checkpoints
from actors.trainer.backends.torch.exported_files import as_it_was, copy_tokenizer
from actors.trainer.errors import CannotMerge

_PLAIN: Final = {
    "use_dora": False,
    "use_rslora": False,
    "bias": "none",
    "modules_to_save": None,
    "fan_in_fan_out": False,
}
"""Settings that our adapters have; an adapter with other ones would be merged wrongly."""


def merge(directory: Path, out: Path, base: Path | None) -> dict[str, Any]:
    """Write the base with the adapter in ``directory`` merged into it to ``out``; returns a summary.

    ``base``: where the base lies now, if it was moved.

    Raises:
        CannotMerge: the adapter or its base is missing, altered, or of a kind that cannot be merged.
    """
    config = _config(directory)
    if (directory / checkpoints.STATE_FILE).is_file():
        checkpoints.read(directory)  # verifies the hash of each file
    tensors, identity = _tensors(directory / TENSOR_FILE)
    path = base or Path(str(config.get("base_model_name_or_path", "")))
    if not (path / "config.json").is_file():
        raise CannotMerge(f"{directory}: its base was {path}, where no model is; name the directory with --base")
    if identity and (found := base_identity(path)) != identity:
        raise CannotMerge(
            f"{directory}: is an adapter of a model with xxh3 {identity}, and {path} holds one with {found}; name the "
            "directory that holds the former with --base"
        )
    model = _load(path)
    layers = _add(model, tensors, config, directory)
    partial = out.with_name(f"{out.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    with as_it_was(model):
        model.save_pretrained(partial, safe_serialization=True)
    copy_tokenizer(directory, partial)
    copy_tokenizer(path, partial)
    partial.rename(out)
    return {"path": str(out), "base": str(path), "layers": layers, "parameters": model.num_parameters()}


def _config(directory: Path) -> dict[str, Any]:
    if not (directory / CONFIG_FILE).is_file():
        has_model = (directory / "config.json").is_file()
        what = (
            "holds a whole model already" if has_model else f"has no {CONFIG_FILE}, expected a checkpoint of an adapter"
        )
        raise CannotMerge(f"{directory}: {what}; name a directory RUN/checkpoints/step_… of a job with model.adapter")
    try:
        config: dict[str, Any] = json.loads((directory / CONFIG_FILE).read_text("utf-8"))
        plain = config["peft_type"] == "LORA" and config["r"] >= 1 and config["lora_alpha"] > 0
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CannotMerge(f"{directory / CONFIG_FILE}: is no description of a LoRA adapter: {error!r}") from error
    odd = [key for key, value in _PLAIN.items() if config.get(key, value) != value]
    if not plain or odd or config.get("rank_pattern") or config.get("alpha_pattern"):
        raise CannotMerge(
            f"{directory / CONFIG_FILE}: is no plain LoRA adapter{f' (it sets {odd[0]})' if odd else ''}; merge it "
            "with the library that made it"
        )
    return config


def _tensors(path: Path) -> tuple[dict[str, Tensor], str]:
    """The tensors by name, and the identity of their base model, empty if the file names none."""
    try:
        with safe_open(path, framework="pt") as file:
            identity = (file.metadata() or {}).get("base", "")
            return {name: file.get_tensor(name) for name in file.keys()}, identity  # noqa: SIM118 safe_open is no mapping
    except (OSError, ValueError, SafetensorError) as error:
        raise CannotMerge(f"{path}: {error}; name another checkpoint") from error


def _load(path: Path) -> Any:
    from transformers import AutoModelForCausalLM

    try:
        return load_whole(AutoModelForCausalLM, path, dtype="auto")
    except Exception as error:
        if passes(error):
            raise
        raise CannotMerge(f"{path}: cannot be loaded as a causal language model: {brief(error)}") from error


@torch.no_grad()
def _add(model: Any, tensors: dict[str, Tensor], config: dict[str, Any], directory: Path) -> int:
    """Add the adapter to the weights; returns how many of them have one."""
    experts = chosen(expert_weights(model), tuple(config.get("target_parameters") or ()))
    known = linear_layers(model) | output_embedding(model) | placed(experts)
    layers = [layer_of(name) for name in tensors if name.endswith(f".{A}.weight")]
    for layer in layers:
        a, b = (tensors.get(name) for name in tensor_names(layer))
        adapted = known.get(layer)
        if adapted is None or a is None or b is None or (a.shape, b.shape) != adapted.shapes(config["r"]):
            raise CannotMerge(f"{directory / TENSOR_FILE}: {layer!r} is no linear layer of that shape in its base")
        if untie(model, adapted):
            model.config.get_text_config().tie_word_embeddings = model.config.tie_word_embeddings = False
        scale = config["lora_alpha"] / config["r"]
        adapted.weight.copy_(adapted.adapted(adapted.weight.float(), a.float(), b.float(), scale))
    if 2 * len(layers) != len(tensors) or not layers:
        raise CannotMerge(f"{directory / TENSOR_FILE}: holds other tensors than the two of each layer")
    return len(layers)
