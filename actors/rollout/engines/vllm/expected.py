"""The tensors that a version must hold for vLLM, and models that it would not compute with them."""

from __future__ import annotations

from typing import Any

from actors.models.experts import are_experts
from actors.rollout.engine import EngineSpec
from actors.rollout.engines.adapter_tensors import AdapterTensors
from actors.rollout.engines.vllm.setup import resolved_device
from actors.rollout.engines.vllm.weights import Expected, model_without_memory
from actors.rollout.errors import ModelUnreadable


def expected_of(spec: EngineSpec) -> Expected | AdapterTensors:
    """The tensors that a version of ``spec`` must hold, found without allocating the model.

    Raises:
        ModelUnreadable: the checkpoint is incomplete, the adapter names no layer of it, or vLLM cannot compute it.
    """
    expected = Expected.of_checkpoint(spec.model_path, spec.dtype)
    if spec.adapter is None:
        return expected
    model = model_without_memory(spec.model_path)
    adapted = AdapterTensors.of_model(model, spec.adapter, spec.dtype)
    _check_experts(model, adapted, spec)
    return adapted


def _check_experts(model: Any, adapted: AdapterTensors, spec: EngineSpec) -> None:
    """Raises ModelUnreadable for what vLLM does not compute of a mixture of experts."""
    if any(layer.experts for layer in adapted.layers.values()):
        raise ModelUnreadable(
            "model.adapter.targets: some name weights of experts, and vLLM is given adapters of linear layers only: "
            "name other layers, or use rollout.engine: torch"
        )
    if resolved_device(spec.device) == "cpu" and any(map(are_experts, model.modules())):
        raise ModelUnreadable(
            f"model.adapter: vLLM's build for CPUs cannot compute the experts of {spec.model_path} once it has "
            "adapters, of whatever layers; use rollout.engine: torch"
        )
