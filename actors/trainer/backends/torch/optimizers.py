"""Optimizers over the flat buffers, by the name that ``trainer.optimizer`` gives them.

    adamw       one group of matrices, which decay, and one of vectors, which do not
    adamw8bit   AdamW whose two moments have 8 bits a number for matrices, by bitsandbytes, and 32 for vectors
    muon        hidden matrices by Muon; embeddings, head and vectors by AdamW, each contiguous range a group of its own

State tensors are flat, so that an optimizer is saved and parked as the weights are. They are made by the first step,
or before it when they are saved or loaded, or at the start if their memory has to keep its addresses while it is given
back.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, Final, Protocol

import torch
from torch import Tensor, nn

from actors.trainer.backend import AdamStep, BackendSpec
from actors.trainer.backends.torch.flat import FlatParameters
from actors.trainer.errors import ModelNotLoadable

MOMENTS: Final = ("exp_avg", "exp_avg_sq")
_MOMENTUM: Final = "momentum_buffer"
_BLOCK: Final = 256
"""Numbers that share a scale in bitsandbytes."""
_PIECE: Final = 1 << 24
"""Numbers of the flat buffer that bitsandbytes updates at once: whole blocks."""
Range = tuple[int, int, bool]
"""First number of a group in the flat buffer, the one behind its last, and whether it decays."""


class Optimizer(Protocol):
    """Updates the master weights from the gradient sums."""

    name: str

    @property
    def groups(self) -> int:
        """Count of groups with a step count of their own."""
        ...

    @property
    def sizes(self) -> Sequence[tuple[str, int]]:
        """Names of the state's tensors and their bytes, whether the state exists yet or not."""
        ...

    @property
    def has_state(self) -> bool:
        """Whether the state exists yet."""
        ...

    def step(self, adam: AdamStep) -> None:
        """Update. Of ``adam`` AdamW takes everything but the clipping, the others only the learning rate."""
        ...

    def state(self) -> dict[str, Tensor]:
        """The tensors by the names of ``sizes``, made now if need be, to be filled: float32[n] or uint8[n]."""
        ...

    def counts(self) -> list[float]:
        """Step counts of the groups, 0 before the first step."""
        ...

    def set_counts(self, counts: list[float]) -> None: ...


def _part(flat: FlatParameters, start: int, end: int) -> nn.Parameter:
    """The numbers of the flat buffer from ``start`` to before ``end``, with their gradient sums."""
    part = nn.Parameter(flat.master[start:end])
    part.grad = flat.grad[start:end]
    return part


def set_adam(optimizer: torch.optim.AdamW, adam: AdamStep) -> None:
    """Let the next step have these hyper-parameters. Groups say by ``decays`` whether they do."""
    for group in optimizer.param_groups:
        group["lr"], group["betas"], group["eps"] = adam.learning_rate, (adam.beta1, adam.beta2), adam.eps
        group["weight_decay"] = adam.weight_decay if group["decays"] else 0.0


class Adam:
    """AdamW over ``ranges`` of the flat buffer, by default one of matrices and one of vectors."""

    name = "adamw"

    def __init__(self, flat: FlatParameters, spec: BackendSpec, ranges: Sequence[Range] | None = None) -> None:
        self._memory = flat.memory
        if ranges is None:
            ranges = [(0, flat.first_vector, True), (flat.first_vector, flat.master.numel(), False)]
        groups: list[dict[str, Any]] = []
        for start, end, decays in ranges:
            if end > start:
                groups.append({"params": [_part(flat, start, end)], "decays": decays})
        self._adam = torch.optim.AdamW(groups, lr=spec.learning_rate, betas=spec.adam_betas, fused=True)
        self._parts: list[Tensor] = [group["params"][0] for group in groups]
        if self._memory.keeps_addresses_by_itself:
            self.state()

    @property
    def groups(self) -> int:
        return len(self._parts)

    @property
    def sizes(self) -> list[tuple[str, int]]:
        return [(f"{moment}.{index}", part.nbytes) for moment in MOMENTS for index, part in enumerate(self._parts)]

    @property
    def has_state(self) -> bool:
        return bool(self._adam.state)

    def step(self, adam: AdamStep) -> None:
        set_adam(self._adam, adam)
        self._adam.step()

    def state(self) -> dict[str, Tensor]:
        states = self._states()
        return {f"{moment}.{index}": state[moment] for moment in MOMENTS for index, state in enumerate(states)}

    def _states(self) -> list[dict[str, Tensor]]:
        for part in self._parts:
            state = self._adam.state[part]
            if not state:
                state["step"] = torch.zeros((), dtype=torch.float32, device=part.device)
                for moment in MOMENTS:
                    state[moment] = self._memory.zeros(part.numel(), part.dtype)
        return [self._adam.state[part] for part in self._parts]

    def counts(self) -> list[float]:
        return [float(state["step"]) for state in self._states()] if self.has_state else [0.0] * self.groups

    def set_counts(self, counts: list[float]) -> None:
        for state, count in zip(self._states(), counts, strict=True):
            state["step"].fill_(count)


class Adam8bit:
    """AdamW of bitsandbytes: the moments of matrices are quantised in blocks of 256 numbers, each with a scale.

    Vectors keep float32 moments, as those of small tensors do in bitsandbytes. It is given the flat buffer in pieces:
    its kernels count numbers in 32 bits, and on a CPU they take a piece's moments apart as a whole. Source: Dettmers et
    al. 2022 (8-bit optimizers via block-wise quantization), sections 2.1 and 2.2.

    Raises:
        ModelNotLoadable: bitsandbytes is not installed.
    """

    name = "adamw8bit"
    groups = 1

    def __init__(self, flat: FlatParameters, spec: BackendSpec, _model: nn.Module) -> None:
        try:
            from bitsandbytes.optim.adamw import AdamW8bit  # pyright: ignore[reportMissingImports] - an optional extra
        except ImportError as error:
            wrong = "trainer.optimizer is adamw8bit, which needs bitsandbytes: pip install 'headrace[optimizers]'"
            raise ModelNotLoadable(f"{wrong} ({error})") from error
        self._memory, self._device, self._tensors = flat.memory, flat.master.device, dict[str, Tensor]()
        matrices, numbers = flat.first_vector, flat.master.numel()
        self._layout: dict[str, tuple[int, torch.dtype]] = {}
        """Count and dtype of each tensor of the state."""
        for moment in (1, 2):
            self._layout[f"state{moment}"] = matrices, torch.uint8
            self._layout[f"absmax{moment}"] = math.ceil(matrices / _BLOCK), torch.float32
            self._layout[f"vectors{moment}"] = numbers - matrices, torch.float32
        self._pieces = [_part(flat, at, min(at + _PIECE, matrices)) for at in range(0, matrices, _PIECE)]
        self._vectors = [_part(flat, matrices, numbers)] if numbers > matrices else []
        decays = (self._pieces, spec.weight_decay), (self._vectors, 0.0)
        groups = [{"params": parts, "weight_decay": decay} for parts, decay in decays if parts]
        self._adam: Any = AdamW8bit(groups, lr=spec.learning_rate, betas=spec.adam_betas)
        if self._memory.keeps_addresses_by_itself:
            self.state()

    @property
    def sizes(self) -> list[tuple[str, int]]:
        return [(name, count * dtype.itemsize) for name, (count, dtype) in self._layout.items() if count]

    @property
    def has_state(self) -> bool:
        return bool(self._tensors)

    def step(self, adam: AdamStep) -> None:
        self.state()
        for group in self._adam.param_groups:
            group["lr"] = adam.learning_rate
        self._adam.step()

    def state(self) -> dict[str, Tensor]:
        if not self._tensors:
            self._adam.fill_qmap()
            maps = {name: tensor.to(self._device) for name, tensor in self._adam.name2qmap.items()}
            made = {name: self._memory.zeros(count, dtype) for name, (count, dtype) in self._layout.items() if count}
            for index, piece in enumerate(self._pieces):
                own = self._adam.state[piece]
                own |= {"step": 0, "qmap1": maps["dynamic"], "qmap2": maps["udynamic"]}
                for moment in (1, 2):
                    own[f"state{moment}"] = made[f"state{moment}"].split(_PIECE)[index]
                    own[f"absmax{moment}"] = made[f"absmax{moment}"].split(_PIECE // _BLOCK)[index]
            for part in self._vectors:
                self._adam.state[part] |= {"step": 0, "state1": made["vectors1"], "state2": made["vectors2"]}
            self._tensors = made
        return self._tensors

    def counts(self) -> list[float]:
        return [float(next(iter(self._adam.state.values()))["step"])] if self.has_state else [0.0]

    def set_counts(self, counts: list[float]) -> None:
        self.state()
        for own in self._adam.state.values():
            own["step"] = int(counts[0])


class Muon:
    """Torch's Muon for hidden matrices, and AdamW for all other weights, with one learning rate for both.

    An update of Muon is scaled by 0.2 √max(rows, columns), to the size that AdamW's updates have, so that rates and
    decays mean the same. Sources: Jordan 2024 (Muon: an optimizer for hidden layers in neural networks); the scale, Liu
    et al. 2025 (Muon is scalable for LLM training), section 2.2, equation 4.
    """

    name = "muon"

    def __init__(self, flat: FlatParameters, spec: BackendSpec, model: nn.Module) -> None:
        self._memory = flat.memory
        hidden = _hidden_matrices(model)
        itemsize = flat.flat.element_size()
        self._matrices: list[nn.Parameter] = []
        ranges, rest = list[Range](), 0
        ends = [entry.offset_bytes // itemsize for entry in flat.entries[1:]] + [flat.master.numel()]
        for entry, end in zip(flat.entries, ends, strict=True):
            if entry.name not in hidden:
                continue
            start = entry.offset_bytes // itemsize
            ranges.append((rest, start, True))
            own = slice(start, start + math.prod(entry.shape))
            part = nn.Parameter(flat.master[own].view(entry.shape))
            part.grad = flat.grad[own].view(entry.shape)
            self._matrices.append(part)
            rest = end
        if not self._matrices:
            raise ModelNotLoadable(f"trainer.optimizer: {type(model).__name__} has no hidden matrices; set it to adamw")
        ranges += [(rest, flat.first_vector, True), (flat.first_vector, flat.master.numel(), False)]
        self._rest = Adam(flat, spec, ranges)
        self._count = sum(part.numel() for part in self._matrices)
        self._muon = torch.optim.Muon(
            self._matrices, lr=spec.learning_rate, weight_decay=spec.weight_decay, adjust_lr_fn="match_rms_adamw"
        )
        self._momentum: Tensor | None = None
        if self._memory.keeps_addresses_by_itself:
            self.state()

    @property
    def groups(self) -> int:
        return self._rest.groups

    @property
    def sizes(self) -> list[tuple[str, int]]:
        return [(_MOMENTUM, 4 * self._count), *self._rest.sizes]

    @property
    def has_state(self) -> bool:
        return self._momentum is not None

    def step(self, adam: AdamStep) -> None:
        self.state()
        for group in self._muon.param_groups:
            group["lr"] = adam.learning_rate
        self._muon.step()
        self._rest.step(adam)

    def state(self) -> dict[str, Tensor]:
        if self._momentum is None:
            self._momentum = self._memory.zeros(self._count, torch.float32)
            parts = self._momentum.split([part.numel() for part in self._matrices])
            for part, own in zip(self._matrices, parts, strict=True):
                self._muon.state[part][_MOMENTUM] = own.view(part.shape)
        return {_MOMENTUM: self._momentum, **self._rest.state()}

    def counts(self) -> list[float]:
        return self._rest.counts()

    def set_counts(self, counts: list[float]) -> None:
        self._rest.set_counts(counts)


def _hidden_matrices(model: nn.Module) -> set[str]:
    """Names of the matrices between the embeddings and the head. Experts that are stacked in one tensor are none."""
    ends = [model.get_output_embeddings(), *(part for part in model.modules() if isinstance(part, nn.Embedding))]  # type: ignore[operator]
    apart = {id(parameter) for end in ends if isinstance(end, nn.Module) for parameter in end.parameters()}
    named = model.named_parameters()
    return {name for name, own in named if own.requires_grad and own.dim() == 2 and id(own) not in apart}


OPTIMIZERS: Final[dict[str, Callable[[FlatParameters, BackendSpec, nn.Module], Optimizer]]] = {
    "adamw": lambda flat, spec, _model: Adam(flat, spec),
    "adamw8bit": Adam8bit,
    "muon": Muon,
}
