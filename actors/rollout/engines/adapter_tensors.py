"""Which tensors a version has that is an adapter, and whether those that came are these; for every engine alike."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from actors.host.adapted_layers import NoSuchTarget, adapted_layers
from actors.host.adapter import AdapterSpec, tensor_names
from actors.rollout.engine import WeightTensors
from actors.rollout.errors import ModelUnreadable, WeightsMismatch

_ARRAY_OF: Final = {"bfloat16": "uint16"}
"""dtypes that numpy lacks, and the words in which they travel."""


@dataclass(frozen=True, slots=True)
class AdapterTensors:
    """Names the layers of a model that have an adapter, and the tensors of one. ``dtype``: torch's name of it."""

    layers: Mapping[str, Any]
    """Linear modules by name."""
    shapes: Mapping[str, tuple[int, ...]]
    dtype: str
    spec: AdapterSpec

    @classmethod
    def of_model(cls, model: Any, spec: AdapterSpec, dtype: str) -> AdapterTensors:
        """Those of ``model``, which may lie on the meta device.

        Raises:
            ModelUnreadable: a target names none of its layers.
        """
        try:
            layers = adapted_layers(model, spec)
        except NoSuchTarget as error:
            raise ModelUnreadable(str(error)) from error
        shapes: dict[str, tuple[int, ...]] = {}
        for name, layer in layers.items():
            a, b = tensor_names(name)
            shapes |= {a: (spec.rank, layer.in_features), b: (layer.out_features, spec.rank)}
        return cls(layers, shapes, dtype, spec)

    def check(self, tensors: WeightTensors, dtypes: Mapping[str, str]) -> None:
        """Accept exactly the adapter's tensors.

        Raises:
            WeightsMismatch: names the first tensors that are missing, unknown, or of another shape or dtype.
        """
        missing, unknown = sorted(self.shapes.keys() - tensors.keys()), sorted(tensors.keys() - self.shapes.keys())
        if missing or unknown:
            raise WeightsMismatch(
                f"{len(tensors)} tensors came, {len(self.shapes)} are the adapter's; missing {missing[:3]}, unknown "
                f"{unknown[:3]}: trainer and engines must have one model.adapter"
            )
        for name, shape in self.shapes.items():
            array = tensors[name]
            if tuple(array.shape) != shape:
                raise WeightsMismatch(f"{name} has shape {tuple(array.shape)}, the adapter's is {shape}")
            have = dtypes.get(name, array.dtype.name)
            if have != self.dtype or array.dtype.name != _ARRAY_OF.get(have, have):
                raise WeightsMismatch(
                    f"{name} is {have} in {array.dtype} words, the model is {self.dtype}: train and serve in one dtype"
                )
