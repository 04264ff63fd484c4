"""Loading a Hugging Face checkpoint for the torch engine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from actors.host.model_errors import brief, passes
from actors.rollout.errors import EngineUnavailable, ModelUnreadable

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
        ModelUnreadable: no such directory, unknown architecture, or unreadable weights.
    """
    if dtype not in _DTYPES:
        raise ModelUnreadable(f"model.dtype is {dtype!r}: expected one of {', '.join(_DTYPES)}")
    if not (path / "config.json").is_file():
        raise ModelUnreadable(f"{path} has no config.json: expected a Hugging Face checkpoint directory")
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging as transformers_logging

    transformers_logging.disable_progress_bar()
    try:
        model: Any = AutoModelForCausalLM.from_pretrained(path, dtype=_DTYPES[dtype], local_files_only=True)
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
