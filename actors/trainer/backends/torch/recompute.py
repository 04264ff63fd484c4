"""How the backward pass comes by what the layers have computed: kept, computed again, or fetched from main memory.

    none        all of it is kept
    selective   products of matrices and attention are kept, what lies between them is computed again
    whole       a layer's inputs are kept, the layer is computed again
    offload     all of it is kept, in the host's pinned memory; on CUDA alone

transformers checkpoints layers in training mode only, and in that mode models do what no engine does: dropout of any
class or function, layers left out, noise in routers, statistics of batches. So the layers are wrapped here instead, and
nothing of a model ever sees training mode. In eval mode a layer draws no random numbers, so gradients do not depend on
the way. They would with ``selective`` if a layer changed in place what is kept, so each model is looked at first.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from actors.trainer.errors import ModelNotLoadable

_ATTRIBUTE: Final = "headrace_recompute"
_KEPT: Final = (
    *("mm", "addmm", "_grouped_mm", "_scaled_dot_product_flash_attention", "_scaled_dot_product_efficient_attention"),
    *("_scaled_dot_product_cudnn_attention", "_scaled_dot_product_flash_attention_for_cpu"),
)
"""Operations of torch whose results ``selective`` keeps. Not ``bmm``: attention by hand keeps scores by it, which grow
with the square of a row."""


class Recompute:
    """The way of one model's layers, which may change between passes; one of ``WAYS``. ``asked``: as configured."""

    def __init__(self, asked: str) -> None:
        self.asked = asked
        self.way = "whole" if asked == "auto" else asked
        self.may_keep = True
        """Whether ``selective`` gives right gradients."""


def recompute_layers(model: nn.Module, way: str) -> None:
    """Let the layers of ``model`` that transformers would checkpoint do ``way``; ``auto``: ``whole``, until told.

    Raises:
        ModelNotLoadable: the model has no such layers.
    """
    if way == "none":
        return
    layers = outermost_layers(model)
    if not layers:
        raise ModelNotLoadable(
            f"trainer.recompute: {type(model).__name__} has no layers that transformers can checkpoint; unset it"
        )
    chosen = Recompute(way)
    setattr(model, _ATTRIBUTE, chosen)
    for layer in layers:
        layer.forward = _by(chosen, layer, layer.forward)


def use_way(model: nn.Module, way: str) -> None:
    """Let the layers of ``model``, loaded with ``auto``, do ``way`` from the next pass on.

    In place of ``selective`` a model that it is not for does ``whole``, which takes less memory.
    """
    chosen: Recompute = getattr(model, _ATTRIBUTE)
    chosen.way = way if way != "selective" or chosen.may_keep else "whole"


def check_kept(model: nn.Module, forward: Callable[[], object]) -> None:
    """See in one pass of ``model``, made by ``forward``, that nothing is changed in place that ``selective`` keeps.

    Otherwise the layer would be computed again from what was changed already, with other gradients.

    Raises:
        ModelNotLoadable: something is, and ``selective`` was asked for. With ``auto`` it is told.
    """
    chosen: Recompute | None = getattr(model, _ATTRIBUTE, None)
    if chosen is None or chosen.asked not in ("selective", "auto"):
        return
    with torch.no_grad(), _ChangesOfKept() as seen:
        forward()
    if not seen.by:
        return
    why = f"{type(model).__name__} changes by {seen.by} what selective would keep, so that gradients would be wrong"
    if chosen.asked == "selective":
        raise ModelNotLoadable(f"trainer.recompute: {why}. Set it to whole")
    chosen.may_keep = False
    warnings.warn(f"trainer.recompute: auto does whole in place of selective: {why}", stacklevel=2)


class _ChangesOfKept(TorchDispatchMode):
    """Notes the operation by which a result of ``_KEPT`` is changed within its context."""

    def __init__(self) -> None:
        super().__init__()
        self.by = ""
        self._results: list[Tensor] = []
        """Held, so that no later tensor gets the storage of one of them."""
        self._storages: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for argument, given in zip(func._schema.arguments, args, strict=False):  # noqa: SLF001  nothing public says it
            changes = argument.alias_info is not None and argument.alias_info.is_write
            if changes and isinstance(given, Tensor) and _storage(given) in self._storages:
                self.by = str(func)
        result = func(*args, **(kwargs or {}))
        if func in _kept():
            kept = [one for one in (result if isinstance(result, tuple) else (result,)) if isinstance(one, Tensor)]
            self._results += kept
            self._storages |= {_storage(one) for one in kept}
        return result


def _storage(tensor: Tensor) -> int:
    """Where its numbers lie; those of a sharded tensor are in its local one."""
    own: Tensor = getattr(tensor, "_local_tensor", tensor)
    return own.untyped_storage().data_ptr()


def outermost_layers(model: nn.Module) -> list[nn.Module]:
    """The layers of a transformer, without those inside another layer."""
    from transformers.modeling_layers import GradientCheckpointingLayer

    if isinstance(model, GradientCheckpointingLayer):
        return [model]
    return [layer for child in model.children() for layer in outermost_layers(child)]


Call = Callable[[], Any]


def _by(chosen: Recompute, layer: nn.Module, forward: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(forward)
    def call(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        return WAYS[chosen.way](layer, functools.partial(forward, *args, **kwargs))

    return call


def _whole(_layer: nn.Module, forward: Call) -> Any:
    return checkpoint(forward, use_reentrant=False, preserve_rng_state=False)


def _selective(_layer: nn.Module, forward: Call) -> Any:
    contexts = functools.partial(create_selective_checkpoint_contexts, _kept())
    return checkpoint(forward, use_reentrant=False, preserve_rng_state=False, context_fn=contexts)


def _offloaded(layer: nn.Module, forward: Call) -> Any:
    """Weights stay where they are: they are needed anyway, and copies of them would be the most of what is moved."""
    weights = {_storage(own) for own in layer.parameters()}
    there = save_on_cpu(pin_memory=torch.cuda.is_available())

    def pack(tensor: Tensor) -> Any:
        stays = _storage(tensor) in weights
        return (None, tensor) if stays else (there, there.pack_hook(tensor))

    def unpack(packed: Any) -> Tensor:
        return packed[1] if packed[0] is None else there.unpack_hook(packed[1])

    with saved_tensors_hooks(pack, unpack):
        return forward()


WAYS: Final[dict[str, Callable[[nn.Module, Call], Any]]] = {
    "none": lambda _layer, forward: forward(),
    "selective": _selective,
    "whole": _whole,
    "offload": _offloaded,
}


@functools.cache
def _kept() -> list[Any]:
    found = [getattr(torch.ops.aten, name).default for name in _KEPT if hasattr(torch.ops.aten, name)]
    if torch.backends.mkldnn.is_available():
        found.append(torch.ops.mkldnn._linear_pointwise.default)  # noqa: SLF001  see ``actors/models/matmul.py``
    return found
