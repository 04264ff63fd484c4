"""Loading a Hugging Face checkpoint for the torch engine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from actors.models.model_errors import brief, passes
from actors.models.whole_model import load_whole
from actors.rollout.errors import EngineUnavailable, ModelUnreadable, WeightsMismatch

_SAYS_NOTHING_OF_NUMBERS = (
    "_name_or_path",
    "architectures",
    "dtype",
    "torch_dtype",
    "transformers_version",
    "use_cache",
)
"""Keys of a config.json in which two models may differ and still compute alike; ids of tokens are further ones."""
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def pick_device(name: str) -> torch.device:
    """``cpu``, ``cuda``, ``cuda:1`` or ``auto`` (CUDA where there is one).

    Raises:
        EngineUnavailable: CUDA was asked for and torch finds none.
    """
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name.startswith("cuda") and not torch.cuda.is_available():
        raise EngineUnavailable(
            f"rollout.device is {name!r} but torch {torch.__version__} finds no CUDA device: use cpu, or install a "
            "CUDA build of torch"
        )
    return torch.device(name)


def load_model(path: Path, dtype: str, device: torch.device) -> Any:
    """The causal LM in ``path``, in eval mode, with parameters in memory of their own.

    Raises:
        ModelUnreadable: no such directory, unknown architecture, or weights that are unreadable or not whole.
    """
    if dtype not in _DTYPES:
        raise ModelUnreadable(f"model.dtype is {dtype!r}: expected one of {', '.join(_DTYPES)}")
    if not (path / "config.json").is_file():
        raise ModelUnreadable(f"{path} has no config.json: expected a Hugging Face checkpoint directory")
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging as transformers_logging

    transformers_logging.disable_progress_bar()
    try:
        model: Any = load_whole(AutoModelForCausalLM, path, dtype=_DTYPES[dtype])
    except Exception as error:
        if passes(error):
            raise
        raise ModelUnreadable(
            f"model.path: {path} cannot be loaded as a causal language model: {brief(error)}"
        ) from error
    model = model.to(device).eval().requires_grad_(False)
    for parameter in model.parameters():
        if not parameter.untyped_storage().resizable():  # a map of the checkpoint file
            parameter.data = parameter.data.clone()
    return model


def refuse_another_kind(model: Any, other: Any, directory: Path) -> None:
    """Check that ``other``, from ``directory``, computes as ``model`` does, with weights of the same shapes.

    Raises:
        WeightsMismatch: names the keys of config.json, or tensors, in which they differ.
    """
    one, two = _computing(model.config), _computing(other.config)
    differ = sorted(key for key in one.keys() | two.keys() if one.get(key) != two.get(key))
    own, tensors = model.state_dict(), other.state_dict()
    differ += [name for name in own if name not in tensors or own[name].shape != tensors[name].shape]
    if type(model) is not type(other) or differ:
        raise WeightsMismatch(
            f"{directory} holds a {type(other).__name__} that differs from the served {type(model).__name__} in "
            f"{', '.join(differ[:3]) or 'its class'}: expected a model of the same architecture and sizes"
        )


def _computing(config: Any) -> dict[str, Any]:
    keys = config.to_dict()
    return {k: v for k, v in keys.items() if k not in _SAYS_NOTHING_OF_NUMBERS and not k.endswith("_token_id")}


def copy_model(model: Any, other: Any) -> None:
    """Copy the weights of ``other``, which is of the same kind, into ``model`` in place."""
    tensors = other.state_dict()
    with torch.no_grad():
        for name, own in model.state_dict().items():
            own.copy_(tensors[name])
