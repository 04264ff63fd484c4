"""The frozen linear layers of a model in 4 bits a number (QLoRA: Dettmers et al. 2023, section 3, "NormalFloat").

    W ≈ code[i] · largest of 64        16 codes: quantiles of a normal distribution        largest: float32, so 4.5 bits

    model.path ─ round_linears ─▶ a copy whose numbers are such products; engines, PEFT and others load it as any model
                                   └─ pack_linears ─▶ the same numbers in the trainer, in 4.5 bits each

Invariants
- Packing what was rounded loses nothing, so trainer and engines have the same weights; what was not rounded is refused.
- A layer multiplies by its weight in ``model.dtype``, unpacked for that moment: the result is the rounded model's.

The embedding and the head keep their numbers. The scales are not quantised in their turn:
``round_linears`` would then no longer be without loss.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Final

import torch
from torch import Tensor, nn

from actors.models.adapted_layers import linear_layers
from actors.models.matmul import linear
from actors.trainer.errors import ModelNotLoadable

_BLOCK: Final = 64
"""Numbers that share a scale."""


class Packed:
    """Holds a matrix [n, k] in 4 bits a number, and a float32 scale for each 64.

    Raises:
        ModelNotLoadable: bitsandbytes is not installed.
    """

    def __init__(self, matrix: Tensor) -> None:
        library = _library()
        self._unpack = library.dequantize_4bit
        self._shape, self._dtype = matrix.shape, matrix.dtype
        # a row for each block: on a CPU, bitsandbytes 0.50 unpacks wrongly what has a block over the end of a row
        blocks = nn.functional.pad(matrix.flatten(), (0, -matrix.numel() % _BLOCK)).view(-1, _BLOCK)
        self._codes, self._state = library.quantize_4bit(
            blocks, blocksize=_BLOCK, quant_type="nf4", compress_statistics=False
        )

    def unpacked(self) -> Tensor:
        """The matrix, in its former dtype: new memory at each call."""
        return self._unpack(self._codes, self._state).flatten()[: self._shape.numel()].view(self._shape)

    @property
    def nbytes(self) -> int:
        return self._codes.nbytes + self._state.absmax.nbytes

    @property
    def placeholder(self) -> Tensor:
        """A tensor of the matrix's shape, dtype and device that holds no numbers: one zero stands for all."""
        return torch.zeros((), dtype=self._dtype, device=self._codes.device).expand(self._shape)


class _Linear(torch.autograd.Function):
    """y = x Wᵀ + b        dx = g W        W and b are frozen."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, bias: Tensor | None, packed: Packed) -> Tensor:  # type: ignore[override]
        """``x`` [..., k]; [..., n]."""
        ctx.packed = packed
        return linear(x, packed.unpacked(), bias)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, None, None]:  # type: ignore[override]
        by_x = linear(grad, ctx.packed.unpacked().t()) if ctx.needs_input_grad[0] else None
        return by_x, None, None


@torch.no_grad()
def round_linears(model: nn.Module) -> int:
    """Round the weights of the linear layers, all but the output embedding's; returns how many layers there are."""
    layers = linear_layers(model)
    for layer in layers.values():
        layer.weight.copy_(Packed(layer.weight.data).unpacked())
    return len(layers)


@torch.no_grad()
def pack_linears(model: nn.Module, dtype: torch.dtype, device: str) -> dict[str, Packed]:
    """Take the weights of the linear layers out of ``model``, and pack them on ``device``; by the layers' names.

    ``model`` is for ``use_packed`` then. No layer's weight but the one that is being packed is on the device whole.

    Raises:
        ModelNotLoadable: the weights were not rounded.
    """
    packed: dict[str, Packed] = {}
    for name, layer in linear_layers(model).items():
        weight = layer.weight.data.to(device, dtype)
        packed[name] = Packed(weight)
        if not torch.equal(packed[name].unpacked(), weight):
            raise ModelNotLoadable(
                f"model.adapter.quantization: {name} holds other numbers than nf4 has, so the engines would sample "
                "from another model; begin from the copy that a run makes, RUN_DIR/model_nf4"
            )
        layer.weight.data = weight.new_empty(0)
    return packed


def use_packed(model: nn.Module, packed: Mapping[str, Packed]) -> None:
    """Let the layers of ``model`` that ``packed`` names compute with those weights."""
    for name, weight in packed.items():
        layer: Any = model.get_submodule(name)
        layer.weight.data = weight.placeholder
        layer.forward = partial(_forward, layer, weight)


def _forward(layer: nn.Linear, weight: Packed, x: Tensor) -> Tensor:
    multiply: Callable[..., Tensor] = _Linear.apply
    return multiply(x, layer.bias, weight)


def _library() -> Any:
    try:
        from bitsandbytes import functional  # pyright: ignore[reportMissingImports] - an optional extra
    except ImportError as error:
        wrong = "model.adapter.quantization is nf4, which needs bitsandbytes: pip install 'headrace[nf4]'"
        raise ModelNotLoadable(wrong) from error
    return functional
