"""The weights of a loaded model that an adapter stands beside: of linear layers, the output embedding, and of experts.

    its place, as PEFT names it               its own name                             its shape
    model.layers.0.self_attn.q_proj           model.layers.0.self_attn.q_proj          [out, in]
    model.layers.0.mlp.experts.base_layer     model.layers.0.mlp.experts.gate_up_proj  [E, out, in], or [E, in, out]
    model.layers.0.mlp.experts                model.layers.0.mlp.experts.down_proj     the same

transformers keeps a weight of all experts of a layer as one tensor. PEFT wraps the experts once for each such tensor
with an adapter, in the order of the model, so the last of them is the outermost and has the shortest place.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor, nn

from actors.models.adapter import AdapterSpec
from actors.models.experts import are_experts
from configs.adapter_schema import ALL_LINEAR
from configs.model_files import EXPERT_WEIGHTS

_NAMED = 12
"""Number of kinds of layers that an error names at most."""
_FORMER_EXPERTS: Final = ("gate", "gate_proj", "up_proj", "down_proj", "w1", "w2", "w3")
"""Linear layers that experts were before they were one tensor. In a model with experts PEFT takes any module of such a
name for them, also one beside the experts, which it adapts rightly if it is told of the module's parameter."""


class NoSuchTarget(ValueError):
    """A target of the adapter names no linear layer of the model; the message says which there are."""


@dataclass(frozen=True, slots=True)
class AdaptedWeight:
    """Knows one weight of a model. ``owner``: the module that has it, as its parameter ``key``."""

    name: str
    owner: Any
    key: str = "weight"
    experts: int = 0
    """Number of experts whose weight it is; 0: it is a linear layer's."""

    @property
    def weight(self) -> Tensor:
        return getattr(self.owner, self.key)

    @property
    def _is_transposed(self) -> bool:
        return bool(self.owner.is_transposed)

    def shapes(self, rank: int) -> tuple[tuple[int, int], tuple[int, int]]:
        """The shapes of A and B. Those of all experts are one matrix too: A [E * rank, in], B [out, rank * E]."""
        *_, outer, inner = self.weight.shape
        if self.experts and self._is_transposed:
            outer, inner = inner, outer
        width = rank * max(1, self.experts)
        return (width, inner), (outer, width)

    def of_experts(self, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        """A and B of each expert, [E, rank, in] and [E, out, rank]: views."""
        return a.view(self.experts, -1, a.shape[1]), b.view(len(b), -1, self.experts).permute(2, 0, 1)

    def adapted(self, own: Tensor, a: Tensor, b: Tensor, scale: float, *, out: Tensor | None = None) -> Tensor:
        """``own``, of the weight's shape, and what the adapter adds to it; in ``out``, if given."""
        if not self.experts:
            return torch.addmm(own, b, a, alpha=scale, out=out)
        a, b = self.of_experts(a, b)
        left, right = (a.mT, b.mT) if self._is_transposed else (b, a)
        return torch.baddbmm(own, left, right, alpha=scale, out=out)


def adapted_layers(model: Any, spec: AdapterSpec) -> dict[str, AdaptedWeight]:
    """The weights that ``spec`` chooses, by their places, in the order of the model; experts last.

    Raises:
        NoSuchTarget: a target chooses nothing.
    """
    linear, head, experts = linear_layers(model), output_embedding(model), expert_weights(model)
    if not linear:
        raise NoSuchTarget(f"model.adapter: {type(model).__name__} has no linear layers that could have an adapter")
    if not spec.targets:
        return linear
    for target in spec.targets:
        if not _ending_so([ALL_LINEAR, *linear, *head, *experts], target):
            raise NoSuchTarget(
                f"model.adapter.targets: {target!r} names no linear layer of {type(model).__name__}; its layers are "
                f"{_kinds(linear | head, experts)}{_about_others(model, experts)}"
            )
    inner = linear if ALL_LINEAR in spec.targets else chosen(linear, spec.targets)
    return inner | chosen(head, spec.targets) | placed(chosen(experts, spec.targets))


def linear_layers(model: Any) -> dict[str, AdaptedWeight]:
    """All linear layers but the output embedding, by name."""
    head = model.get_output_embeddings()
    named = model.named_modules()
    return {name: AdaptedWeight(name, m) for name, m in named if isinstance(m, nn.Linear) and m is not head}


def output_embedding(model: Any) -> dict[str, AdaptedWeight]:
    """The output embedding by its name; nothing if it is no linear layer."""
    head = model.get_output_embeddings()
    named = model.named_modules()
    return {name: AdaptedWeight(name, m) for name, m in named if isinstance(m, nn.Linear) and m is head}


def untie(model: Any, layer: AdaptedWeight) -> bool:
    """Give ``layer`` a weight of its own if it is tied to the input embedding, which has no adapter; whether it was."""
    is_tied = layer.weight is model.get_input_embeddings().weight
    if is_tied:
        layer.owner.weight = nn.Parameter(layer.weight.detach().clone(), requires_grad=layer.weight.requires_grad)
    return is_tied


def expert_weights(model: nn.Module) -> dict[str, AdaptedWeight]:
    """The weights of experts that are one tensor a layer, by name."""
    return {
        f"{name}.{key}": AdaptedWeight(f"{name}.{key}", part, key, own.shape[0])
        for name, part in model.named_modules()
        if are_experts(part)
        for key, own in part.named_parameters(recurse=False)
        if key in EXPERT_WEIGHTS and own.dim() == 3
    }


def chosen(weights: dict[str, AdaptedWeight], targets: tuple[str, ...]) -> dict[str, AdaptedWeight]:
    """Those of ``weights`` whose names end with one of the ``targets``."""
    return {name: weight for name, weight in weights.items() if any(_ends_so(name, target) for target in targets)}


def placed(experts: dict[str, AdaptedWeight]) -> dict[str, AdaptedWeight]:
    """The weights of experts that have an adapter, by their places."""
    found: dict[str, AdaptedWeight] = {}
    for name, weight in reversed(experts.items()):
        place = name.rpartition(".")[0]
        while place in found:
            place += ".base_layer"
        found[place] = weight
    return dict(reversed(found.items()))


def peft_targets(model: Any, spec: AdapterSpec) -> tuple[list[str], list[str]]:
    """What PEFT has to be told for an adapter of ``model``: ends of names of modules, and of parameters."""
    layers = adapted_layers(model, spec).values()
    linear, experts = [one.name for one in layers if not one.experts], [one.name for one in layers if one.experts]
    named = set(spec.targets or [ALL_LINEAR])
    if ALL_LINEAR in named:
        named |= {name.rpartition(".")[2] for name in linear}
    targets = sorted(named)
    modules = [target for target in targets if _ending_so(linear, target)]
    taken_for_experts = [m for m in modules if expert_weights(model) and m.rpartition(".")[2] in _FORMER_EXPERTS]
    parameters = [target for target in targets if _ending_so(experts, target)]
    parameters += [f"{module}.weight" for module in taken_for_experts]
    return [module for module in modules if module not in taken_for_experts], parameters


def _ending_so(names: list[str], target: str) -> bool:
    return any(_ends_so(name, target) for name in names)


def _ends_so(name: str, target: str) -> bool:
    """Whether ``name`` ends with ``target``, in whole parts, as PEFT matches names."""
    return name == target or name.endswith(f".{target}")


def _about_others(model: nn.Module, known: dict[str, AdaptedWeight]) -> str:
    """What to say of experts that are no linear layers, and not among those ``known``; empty if there are none."""
    inside = [name for name, own in model.named_parameters() if ".experts." in name and own.dim() == 3]
    stacked = dict.fromkeys(name.rpartition(".")[2] for name in inside if name not in known)
    if not stacked:
        return ""
    return (
        f". The weights of all experts of a layer are one tensor ({', '.join(stacked)}), by which transformers "
        "multiplies in a way of this family, so they have no adapters: adapt other layers, or train the whole model "
        "(without model.adapter)"
    )


def _kinds(linear: dict[str, AdaptedWeight], experts: dict[str, AdaptedWeight]) -> str:
    inside = [".".join(name.split(".")[-2:]) for name in experts]
    kinds = list(dict.fromkeys([*(name.rpartition(".")[2] for name in linear), *inside]))
    return ", ".join(kinds[:_NAMED]) + (", …" if len(kinds) > _NAMED else "")
