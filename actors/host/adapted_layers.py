"""The layers of a loaded model that an adapter stands beside."""

from __future__ import annotations

from typing import Any

from torch import nn

from actors.host.adapter import AdapterSpec

_NAMED = 12
"""Kinds of layers that an error names at most."""


class NoSuchTarget(ValueError):
    """A target of the adapter names no linear layer of the model; the message says which there are."""


def adapted_layers(model: Any, spec: AdapterSpec) -> dict[str, nn.Linear]:
    """The linear layers that ``spec`` chooses, by name, in the order of the model.

    Raises:
        NoSuchTarget: one of its targets chooses none, or the output embedding.
    """
    head = model.get_output_embeddings()
    layers = {n: m for n, m in model.named_modules() if isinstance(m, nn.Linear) and m is not head}
    if not layers:
        raise NoSuchTarget(f"model.adapter: {type(model).__name__} has no linear layers that could have an adapter")
    if not spec.targets:
        return layers
    for target in spec.targets:
        if not any(_ends_so(name, target) for name in layers):
            raise NoSuchTarget(
                f"model.adapter.targets: {target!r} names no linear layer of {type(model).__name__}; its layers are "
                f"{_kinds(layers)}, and the output embedding cannot have an adapter"
            )
    return {n: m for n, m in layers.items() if any(_ends_so(n, target) for target in spec.targets)}


def _ends_so(name: str, target: str) -> bool:
    """As PEFT matches: whole parts of the name."""
    return name == target or name.endswith(f".{target}")


def _kinds(layers: dict[str, nn.Linear]) -> str:
    kinds = list(dict.fromkeys(name.rpartition(".")[2] for name in layers))
    return ", ".join(kinds[:_NAMED]) + (", …" if len(kinds) > _NAMED else "")
