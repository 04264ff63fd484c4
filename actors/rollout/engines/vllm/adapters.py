"""Loads versions that are adapters into a running vLLM: each is a LoRA with its own name, made from tensors in memory.

    tensors ─▶ LoRAModel (copied, packed) ─▶ the only slot of the LoRA manager ─▶ requests that name it

Invariants
- A name is used once, since vLLM keys its prefix cache by it: a second adapter of the same name would read what the
  first one computed.
- One adapter is loaded at a time. A request is bound to the one that it was submitted with, so the engine takes all
  requests out of vLLM before it loads another one, and submits them anew.
- Nothing is written to disk.
"""

# pyright: reportMissingImports=false
# vLLM is an optional extra.

from __future__ import annotations

from typing import Any, Final

import torch

from actors.models.adapter import AdapterSpec
from actors.rollout.engine import WeightTensors
from actors.rollout.engines.adapter_tensors import AdapterTensors
from actors.rollout.engines.vllm.weights import as_torch
from actors.rollout.errors import ModelUnreadable

_RANKS: Final = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""Adapter ranks that vLLM supports; an adapter of a rank in between is padded with zeros."""


def lora_arguments(adapter: AdapterSpec) -> dict[str, Any]:
    """Arguments for vLLM's ``EngineArgs`` that make room for one adapter.

    Raises:
        ModelUnreadable: the rank is higher than vLLM allows.
    """
    room = next((rank for rank in _RANKS if rank >= adapter.rank), None)
    if room is None:
        raise ModelUnreadable(
            f"model.adapter.rank is {adapter.rank}, and vLLM serves at most {_RANKS[-1]}: lower it, or use "
            "rollout.engine: torch"
        )
    return {"enable_lora": True, "max_loras": 1, "max_cpu_loras": 1, "max_lora_rank": room}


class Adapters:
    """Loads one version after the other into the LoRA manager of a model runner."""

    def __init__(self, runner: Any, adapted: AdapterTensors) -> None:
        """Raises ModelUnreadable if vLLM's model has no adapters for some of the layers."""
        self._manager: Any = runner.lora_manager._adapter_manager  # noqa: SLF001  it has no name of its own
        self._dtype: torch.dtype = runner.lora_config.lora_dtype
        self._adapted = adapted
        self._kinds = sorted({layer.rpartition(".")[2] for layer in adapted.layers})
        self._request: Any = None
        self._loads = 0
        packed = self._manager.packed_modules_mapping
        served = {part for kind in self._manager.supported_lora_modules for part in packed.get(kind, [kind])}
        if unserved := [kind for kind in self._kinds if kind not in served]:
            raise ModelUnreadable(
                f"model.adapter.targets: vLLM has no adapters for {', '.join(unserved)} of "
                f"{type(self._manager.model).__name__}, only for {', '.join(sorted(served))}: name those, or use "
                "rollout.engine: torch"
            )

    @property
    def request(self) -> Any:
        """The LoRARequest that a sequence is submitted with; None: the model without an adapter."""
        return self._request

    @torch.no_grad()
    def load(self, tensors: WeightTensors, name: str) -> None:
        """Serve checked ``tensors`` under a ``name`` that was never used before."""
        from vllm.lora.lora_model import LoRAModel
        from vllm.lora.peft_helper import PEFTHelper
        from vllm.lora.request import LoRARequest

        manager, model, spec = self._manager, self._manager.model, self._adapted.spec
        self._loads += 1
        mapper = getattr(model, "hf_to_vllm_mapper", None)
        lora = LoRAModel.from_lora_tensors(
            self._loads,
            {key: as_torch(array, self._adapted.dtype).clone() for key, array in tensors.items()},
            PEFTHelper(r=spec.rank, lora_alpha=spec.alpha, target_modules=self._kinds),  # type: ignore[arg-type]
            device="cpu",
            dtype=self._dtype,
            weights_mapper=None if mapper is None else mapper.get_rename_mapper(),
            skip_prefixes=getattr(model, "lora_skip_prefixes", None),
        )
        if self._request is not None:
            manager.remove_adapter(self._request.lora_int_id)
        manager.add_adapter(lora)
        manager.activate_adapter(self._loads)
        self._request = LoRARequest(lora_name=name, lora_int_id=self._loads, lora_path=f"memory:{name}")
