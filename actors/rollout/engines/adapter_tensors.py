"""The tensors that a version must have if it is an adapter, for every engine alike."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from actors.models.adapted_layers import AdaptedWeight, NoSuchTarget, adapted_layers
from actors.models.adapter import AdapterSpec, tensor_names
from actors.rollout.engine import WeightTensors
from actors.rollout.errors import ModelUnreadable, WeightsMismatch

_ARRAY_OF: Final = {"bfloat16": "uint16"}
"""dtype that numpy lacks → dtype of the array that carries its bits."""


@dataclass(frozen=True, slots=True)
class AdapterTensors:
    """Names the layers of a model that have an adapter, and the adapter's tensors. ``dtype`` is torch's name."""

    layers: Mapping[str, AdaptedWeight]
    """The weights that have an adapter, by their places."""
    shapes: Mapping[str, tuple[int, ...]]
    dtype: str
    spec: AdapterSpec

    @classmethod
    def of_model(cls, model: Any, spec: AdapterSpec, dtype: str) -> AdapterTensors:
        """The adapter's tensors for ``model``, which may lie on the meta device.

        Raises:
            ModelUnreadable: a target names none of its layers.
        """
        try:
            layers = adapted_layers(model, spec)
        except NoSuchTarget as error:
            raise ModelUnreadable(str(error)) from error
        shapes: dict[str, tuple[int, ...]] = {}
        for name, layer in layers.items():
            shapes |= dict(zip(tensor_names(name), layer.shapes(spec.rank), strict=True))
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
