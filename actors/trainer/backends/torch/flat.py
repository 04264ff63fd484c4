"""All trained parameters of a model in one flat buffer, laid out exactly as the weight segment.

    flat    [ matrices … | vectors … ]   the model's parameters are views of it, 64-byte aligned
    sums    [ matrices … | vectors … ]   of gradients, float32, for each replica of the model

One buffer makes the step a handful of large operations instead of several per parameter, and an export one copy.
Matrices come first because only they are subject to weight decay.

Tied parameters are stored once, under the first of their names, as ``save_pretrained`` does; engines tie them again.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor, nn

from actors.protocol.weights import TensorEntry
from actors.trainer.backends.torch.flat_memory import FlatMemory, PlainMemory
from actors.trainer.backends.torch.pinned import Staging
from actors.weights.manifest import layout


def trained_parameters(model: nn.Module) -> list[tuple[str, nn.Parameter]]:
    """Parameters that require gradients, each once, by its first name, in the order of the segment."""
    trained = [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]
    return sorted(trained, key=lambda pair: pair[1].dim() < 2)


def dtype_name(dtype: torch.dtype) -> str:
    """The name in torch, without ``torch.``: ``float32``, ``bfloat16``."""
    return str(dtype).removeprefix("torch.")


def bytes_of(tensor: Tensor) -> memoryview:
    """uint8[nbytes]: the bytes of a flat tensor on the CPU, not a copy."""
    return tensor.detach().view(torch.uint8).numpy().data


def fingerprint(entries: tuple[TensorEntry, ...], kind: str) -> str:
    """A text that says which tensors lie where. ``kind``: see ``FlatParameters``."""
    lines = [f"{e.name} {e.dtype} {list(e.shape)} {e.offset_bytes}" for e in entries]
    return "\n".join([*([kind] if kind else []), *lines])


class GradientSums:
    """Sums one replica's gradients: ``total`` float32[n], and ``low``, to which its backward passes add."""

    def __init__(self, flat: Tensor, memory: FlatMemory) -> None:
        self.total = memory.zeros(flat.numel(), torch.float32)
        self.low = self.total if flat.dtype == torch.float32 else memory.zeros(flat.numel(), flat.dtype)
        self._of: list[tuple[nn.Parameter, Tensor]] = []

    def assign(self, parameters: list[nn.Parameter], totals: Iterable[Tensor], lows: Iterable[Tensor]) -> None:
        """Let autograd add the gradients of ``parameters`` to these views of ``low``."""
        self._of = list(zip(parameters, totals, strict=True))
        for parameter, low in zip(parameters, lows, strict=True):
            parameter.grad = low

    def of(self, parameter: Tensor) -> Tensor | None:
        """The view of ``total`` that is a parameter's, for who adds up its gradient in float32; None if it has none."""
        return next((total for known, total in self._of if known is parameter), None)

    def collect(self) -> None:
        """Add what a backward pass has left in low precision to the float32 sums."""
        if self.low is not self.total:
            self.total.add_(self.low)
            self.low.zero_()

    def zero(self) -> None:
        """Clear the sums, and what a failed backward pass may have left."""
        self.total.zero_()
        if self.low is not self.total:
            self.low.zero_()


class FlatParameters:
    """Moves the trained parameters of ``model`` (all of one dtype, on one device) into a flat buffer, in place.

    ``flat`` dtype[n], ``master`` float32[n] (``flat`` itself in float32), ``grad`` float32[n], ``sums`` of each
    replica; the first is ``model``, whose ``total`` is ``grad``. ``memory``: where the buffers lie, and may be parked.
    ``kind`` says what names and shapes do not, such as which model an adapter belongs to.
    """

    def __init__(self, model: nn.Module, memory: FlatMemory | None = None, *, prefix: str = "", kind: str = "") -> None:
        parameters = trained_parameters(model)
        dtype, device = parameters[0][1].dtype, parameters[0][1].device
        shapes = [(prefix + name, dtype_name(dtype), tuple(parameter.shape)) for name, parameter in parameters]
        self._kind = kind
        self.entries, self.total_bytes = layout(shapes)
        self.memory = memory or PlainMemory(device)
        self.flat = self.memory.zeros(self.total_bytes // dtype.itemsize, dtype)
        for (_, parameter), view in zip(parameters, self._views(self.flat), strict=True):
            view.copy_(parameter.data)
        self.sums: list[GradientSums] = []
        self.attach(model)
        self.grad = self.sums[0].total
        self.master = self.flat
        if dtype != torch.float32:
            self.master = self.memory.zeros(self.flat.numel(), torch.float32).copy_(self.flat)
        vectors = [entry.offset_bytes for entry in self.entries if len(entry.shape) < 2]
        self.first_vector = (vectors[0] if vectors else self.total_bytes) // dtype.itemsize
        self._staging = Staging()

    def _views(self, buffer: Tensor) -> Iterator[Tensor]:
        itemsize = self.flat.dtype.itemsize
        for entry in self.entries:
            start = entry.offset_bytes // itemsize
            yield buffer[start : start + entry.length_bytes // itemsize].view(entry.shape)

    def by_name(self) -> dict[str, Tensor]:
        """The weights under their published names; views, valid until the next step."""
        return {entry.name: view for entry, view in zip(self.entries, self._views(self.flat), strict=True)}

    def attach(self, model: nn.Module) -> GradientSums:
        """Let a model of the same layout compute with these weights, and sum its gradients separately."""
        sums = GradientSums(self.flat, self.memory)
        parameters = [parameter for _, parameter in trained_parameters(model)]
        for parameter, view in zip(parameters, self._views(self.flat), strict=True):
            parameter.data = view
        sums.assign(parameters, self._views(sums.total), self._views(sums.low))
        self.sums.append(sums)
        return sums

    def gather_gradients(self) -> None:
        """Add the replicas' sums to ``grad``, in the replicas' order. Call it once before ``zero_gradients``."""
        for sums in self.sums[1:]:
            self.grad.add_(sums.total)

    def zero_gradients(self) -> None:
        """Clear all sums."""
        for sums in self.sums:
            sums.zero()

    def publish_master(self) -> None:
        """Round the float32 master weights into the model's dtype, after an optimizer step."""
        if self.master is not self.flat:
            self.flat.copy_(self.master)

    def load_master(self, master: Tensor) -> None:
        """Replace all weights by ``master`` float32[n]."""
        self.master.copy_(master)
        self.publish_master()

    def bytes_on_host(self) -> memoryview:
        """uint8[total_bytes]: the segment; on the CPU the live weights, else a copy that the next call overwrites."""
        if self.flat.device.type == "cpu":
            return bytes_of(self.flat)
        return self._staging.bytes_of(self.flat)

    def close(self) -> None:
        """Give back the memory that torch does not free: no tensor of ours may be used any more."""
        self._staging.close()
        self.memory.close()

    def fingerprint(self) -> str:
        """A text that says which tensors lie where; equal for buffers that may take each other's contents."""
        return fingerprint(self.entries, self._kind)
