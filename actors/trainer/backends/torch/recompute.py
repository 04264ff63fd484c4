"""Gradient checkpointing for a model that stays in eval mode: what is trained is what was sampled.

    forward    layer(hidden) under torch's checkpoint: only its inputs are kept
    backward   layer(hidden) once more, with gradients

transformers checkpoints layers in training mode only, and in that mode models do what no engine does: dropout of any
class or function, layers left out, noise in routers, statistics of batches. So the layers are wrapped here instead, and
nothing of a model ever sees training mode.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from actors.trainer.errors import ModelNotLoadable


def recompute_layers(model: nn.Module) -> None:
    """Have the layers of ``model`` that transformers would checkpoint computed again in the backward pass.

    Raises:
        ModelNotLoadable: it has none.
    """
    layers = outermost_layers(model)
    if not layers:
        raise ModelNotLoadable(
            f"trainer.gradient_checkpointing: {type(model).__name__} has no layers that transformers can checkpoint; "
            "unset it"
        )
    for layer in layers:
        layer.forward = _recomputed(layer.forward)


def outermost_layers(model: nn.Module) -> list[nn.Module]:
    """The layers of a transformer; a layer within a layer goes with it."""
    from transformers.modeling_layers import GradientCheckpointingLayer

    if isinstance(model, GradientCheckpointingLayer):
        return [model]
    return [layer for child in model.children() for layer in outermost_layers(child)]


def _recomputed(forward: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(forward)
    def call(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        # nothing is drawn in eval mode, so there is no state of a generator to restore
        return checkpoint(forward, *args, use_reentrant=False, preserve_rng_state=False, **kwargs)

    return call
