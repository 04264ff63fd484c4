"""Routers of mixtures of experts: which experts each token went to, as bytes that travel beside the token.

    engine     router ─ forward hook ─▶ chosen experts of each row's newest token ─▶ uint8[rows, bytes]
    trainer    uint8[positions, bytes] ─▶ given experts, weighed by the trainer's own router

A token's routes are those of the position that predicts it: that is what the engine computes when it draws the token.
All layers' experts stand in the order of the layers, each as its number plus 1, so that 0 says: not known. They are
uint8 if the layer has at most 255 experts, else little-endian uint16; nobody between engine and trainer needs to know.

Families differ in how a router makes weights of its logits; ``_RULES`` has a rule by the name of the router's class.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor, nn

_IN_A_BYTE: Final = 255
"""Most experts of a layer whose numbers plus 1 fit into a byte."""

Weigh = Callable[[Any, Tensor, Tensor], Tensor]
"""Function of a router, its logits [n, experts], and experts int64[n, k] → their weights [n, k], as it makes them."""


def _softmax_of_all(router: Any, logits: Tensor, given: Tensor) -> Tensor:
    weights = torch.softmax(logits, -1, dtype=torch.float).gather(-1, given)
    return weights / weights.sum(-1, keepdim=True) if getattr(router, "norm_topk_prob", True) else weights


def _softmax_of_chosen(router: Any, logits: Tensor, given: Tensor) -> Tensor:
    return torch.softmax(logits.gather(-1, given), -1)


def _sigmoid(router: Any, logits: Tensor, given: Tensor) -> Tensor:
    weights = logits.float().sigmoid().gather(-1, given)
    if router.norm_topk_prob:
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
    return weights * router.routed_scaling_factor


@dataclass(frozen=True, slots=True)
class _Rule:
    """Says how a class of routers weighs experts, and where its output has logits, weights and experts."""

    weigh: Weigh
    logits: int = 0
    chosen: int = 2


_RULES: Final[dict[str, _Rule]] = {
    "Qwen3MoeTopKRouter": _Rule(_softmax_of_all),
    "Qwen2MoeTopKRouter": _Rule(_softmax_of_all),
    "OlmoeTopKRouter": _Rule(_softmax_of_all),
    "MixtralTopKRouter": _Rule(_softmax_of_all),
    "GptOssTopKRouter": _Rule(_softmax_of_chosen),
    "GraniteMoeTopKRouter": _Rule(_softmax_of_chosen, logits=2, chosen=0),
    "DeepseekV3TopkRouter": _Rule(_sigmoid),
}
"""All put the weights second. The names of the families are in ``configs/checks/expert_checks.py``."""


class Router:
    """One layer's router, whose module in the model is ``module``."""

    def __init__(self, module: Any) -> None:
        self.module = module
        self._rule = _RULES[type(module).__name__]
        self.experts, self.top_k = int(module.num_experts), int(module.top_k)
        self._dtype = np.dtype("u1" if self.experts <= _IN_A_BYTE else "<u2")

    @property
    def width_bytes(self) -> int:
        """Bytes of a token's routes in this layer."""
        return self.top_k * self._dtype.itemsize

    def logits(self, output: Any) -> Tensor:
        """[positions, experts] of the router's ``output``."""
        return output[self._rule.logits].reshape(-1, self.experts)

    def chosen(self, output: Any) -> Tensor:
        """int64[positions, k] of the router's ``output``."""
        return output[self._rule.chosen].reshape(-1, self.top_k)

    def replayed(self, output: Any, given: Tensor) -> Any:
        """``output``, had the router chosen the experts ``given`` int64[positions, k]; own ones where these are < 0."""
        logits, own = self.logits(output), self.chosen(output)
        given = torch.where(given < 0, own, given)
        weights = self._rule.weigh(self.module, logits, given)
        parts = list(output)
        parts[1] = weights.to(output[1].dtype).view_as(output[1])
        parts[self._rule.chosen] = given.to(own.dtype).view_as(output[self._rule.chosen])
        return tuple(parts)

    def packed(self, chosen: np.ndarray) -> np.ndarray:
        """uint8[n, ``width_bytes``] of experts int64[n, k]."""
        return np.ascontiguousarray((chosen + 1).astype(self._dtype)).view(np.uint8)

    def unpacked(self, routes: np.ndarray) -> np.ndarray:
        """Experts int64[n, k] of bytes uint8[n, ``width_bytes``]; -1: not known, or no expert of the layer."""
        chosen = np.ascontiguousarray(routes).view(self._dtype).astype(np.int64) - 1
        return np.where(chosen < self.experts, chosen, -1)


def routers_of(model: nn.Module) -> list[Router]:
    """The routers of ``model`` in the order of their layers; empty if it has none of a known family."""
    return [Router(module) for module in model.modules() if _RULES.get(type(module).__name__) is not None]


class Recorder:
    """Records where the newest token of each row goes, for an engine. ``model``: has routers of a known family."""

    def __init__(self, model: nn.Module) -> None:
        self._routers = routers_of(model)
        self.width_bytes = sum(router.width_bytes for router in self._routers)
        self._chosen: list[Tensor] = [torch.empty(0)] * len(self._routers)
        for layer, router in enumerate(self._routers):
            router.module.register_forward_hook(self._hook(layer, router))

    def _hook(self, layer: int, router: Router) -> Callable[[Any, Any, Any], None]:
        def keep(_module: Any, _args: Any, output: Any) -> None:
            self._chosen[layer] = router.chosen(output)

        return keep

    def newest(self, rows: int) -> np.ndarray:
        """uint8[rows, ``width_bytes``] of the last position of each of the ``rows`` that the model has computed."""
        chosen = [chosen.view(rows, -1, chosen.shape[-1])[:, -1] for chosen in self._chosen]
        parts = np.split(torch.cat(chosen, 1).cpu().numpy(), np.cumsum([part.shape[1] for part in chosen])[:-1], axis=1)
        return np.concatenate([router.packed(part) for router, part in zip(self._routers, parts, strict=True)], axis=1)
