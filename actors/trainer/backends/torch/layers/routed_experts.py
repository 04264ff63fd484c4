"""The routers of a trained mixture of experts: they take the engine's choice of experts, and say how even their own is.

    MicroBatch.routes [B, T] ─ layout ─▶ given experts of each position ─▶ hook at each layer's router ─▶ its output
                                                                            └─ its logits ─▶ balance

Rounding makes engine and trainer choose different experts for some tokens, and then compute different policies. With
the engine's choice given, only the weights of the experts are the trainer's; through these the router learns.

- Positions without known routes choose for themselves: all of the prompt but its last token, and what an environment
  wrote. Where siblings share a position, it takes the routes of the first of them.
- What is given stays until the next forward pass, so that layers recomputed in the backward pass choose the same.
- References and critics are other models, and choose for themselves.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor, nn

from actors.models.routers import Router, routers_of
from actors.trainer.backend import BackendSpec, MicroBatch
from actors.trainer.backends.torch.device_sums import on_device
from actors.trainer.backends.torch.packing import Layout
from actors.trainer.errors import BadMicroBatch, ModelNotLoadable
from configs.checks.expert_checks import BALANCED

_ATTRIBUTE: Final = "headrace_routed_experts"
_PROBE_SHAPE: Final = (2, 12)


class RoutedExperts:
    """Holds the routers of ``model``. ``balances``: whether ``balance`` will be asked for."""

    def __init__(self, model: nn.Module, *, balances: bool = False) -> None:
        self.routers = routers_of(model)
        self._balances, self._collects = balances, False
        self._widths = [router.width_bytes for router in self.routers]
        self._given: list[Tensor] = []
        """int64[positions, k] of each layer, -1 where the router chooses; empty: it chooses everywhere."""
        self._logits: dict[int, Tensor] = {}
        self._used: Tensor | None = None
        for layer, router in enumerate(self.routers):
            router.module.register_forward_hook(self._hook(layer, router))

    def _hook(self, layer: int, router: Router) -> Callable[[Any, Any, Any], Any]:
        def after(_module: Any, _args: Any, output: Any) -> Any:
            if self._collects:
                self._logits[layer] = router.logits(output)
            return router.replayed(output, self._given[layer]) if self._given else None

        return after

    def take(self, batch: MicroBatch, layout: Layout, device: str) -> None:
        """Give the routers what ``batch`` says about the positions of ``layout``, for the next forward pass.

        Raises:
            BadMicroBatch: the routes are not those of this model.
        """
        self._logits, self._collects = {}, self._balances
        if self._balances:
            columns = np.arange(layout.input_ids.shape[1])
            self._used = on_device(columns < layout.used_tokens[:, None], device)
        self._given = [] if batch.routes is None else self._experts(laid_out(batch, layout), device)

    def _experts(self, routes: np.ndarray, device: str) -> list[Tensor]:
        if routes.shape[1] != sum(self._widths):
            raise BadMicroBatch(
                f"routes: {routes.shape[1]} bytes a token, expected {sum(self._widths)}: "
                f"{len(self.routers)} layers of experts; the engine runs another model"
            )
        parts = np.split(routes, np.cumsum(self._widths)[:-1], axis=1)
        experts = [router.unpacked(part) for router, part in zip(self.routers, parts, strict=True)]
        return [on_device(part, device) for part in experts]

    def balance(self) -> Tensor:
        """The load-balancing loss of the tokens just computed, the mean over layers: k if all experts are chosen alike.

        Switch Transformers (Fedus et al. 2021), equations 4 to 6, with k experts a token, as transformers computes it;
        padding does not count.
        """
        from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

        logits, self._logits, self._collects = self._logits, {}, False
        losses = [
            load_balancing_loss_func((logits[layer].float(),), router.experts, router.top_k, self._used)
            for layer, router in enumerate(self.routers)
        ]
        return torch.stack([loss for loss in losses if isinstance(loss, Tensor)]).mean()

    def forget(self) -> None:
        """Let go of what the last pass has left, and of the layers' results that hang on it."""
        self._given, self._logits, self._used, self._collects = [], {}, None, False

    @property
    def top_k(self) -> int:
        """Experts of a token in a layer."""
        return self.routers[0].top_k


def laid_out(batch: MicroBatch, layout: Layout) -> np.ndarray:
    """uint8[R * l, bytes]: the routes of each position of ``layout`` that is computed here, 0 where none are known."""
    assert batch.routes is not None
    columns, width = np.arange(batch.input_ids.shape[1]), layout.input_ids.shape[1]
    where = (columns >= np.maximum(1, batch.prompt_lengths[:, None])) & (columns < batch.lengths[:, None])
    row, column = np.nonzero(where)
    source = row * width + column - 1 if layout.source is None else layout.source[where]
    flat = np.zeros((layout.input_ids.size, batch.routes.shape[2]), np.uint8)
    flat[source[::-1]] = batch.routes[where][::-1]  # the first of those that share a position is written last
    return layout.here(flat.reshape(-1, width, flat.shape[1])).reshape(-1, flat.shape[1])


def attach(model: Any, spec: BackendSpec) -> None:
    """Let the routers of ``model`` be given experts, as ``spec`` wants.

    Raises:
        ModelNotLoadable: it has no routers of a known family, or they do not compute what they did.
    """
    if not (spec.router_replay or spec.load_balancing):
        return
    key = "trainer.router_replay" if spec.router_replay else "algorithm.load_balancing"
    experts = RoutedExperts(model, balances=spec.load_balancing)
    if not experts.routers:
        raise ModelNotLoadable(f"{key}: {type(model).__name__} has no experts whose routers are known here; unset it")
    if spec.load_balancing and model.config.get_text_config().model_type not in BALANCED:
        raise ModelNotLoadable(
            f"algorithm.load_balancing: the routers of {type(model).__name__} make no probabilities that it could "
            "balance; unset it"
        )
    apart = _apart(model, experts)
    if not apart < (1e-3 if spec.dtype == "float32" else 0.1):
        raise ModelNotLoadable(
            f"{key}: {type(model).__name__} computes other logits ({apart:.2g} apart) when its routers are given the "
            "experts that they chose; its routers are not as transformers has them: unset it"
        )
    setattr(model, _ATTRIBUTE, experts)


def routed_experts(model: nn.Module) -> RoutedExperts | None:
    """What ``attach`` has put at ``model``, if anything."""
    return getattr(model, _ATTRIBUTE, None)


def _apart(model: Any, experts: RoutedExperts) -> float:
    """How far an example's logits move when its own routes are replayed, by the largest of them or 1."""
    count = int(np.prod(_PROBE_SHAPE))
    ids = torch.from_numpy(np.random.default_rng(0).integers(0, model.config.vocab_size, _PROBE_SHAPE)).to(model.device)
    chosen: dict[int, np.ndarray] = {}

    def keep(layer: int, router: Router) -> Callable[[Any, Any, Any], None]:
        def after(_module: Any, _args: Any, output: Any) -> None:
            chosen[layer] = router.packed(router.chosen(output).cpu().numpy())

        return after

    hooks = [r.module.register_forward_hook(keep(layer, r)) for layer, r in enumerate(experts.routers)]
    with torch.no_grad():
        own = model(input_ids=ids, use_cache=False).logits.float()
        for hook in hooks:
            hook.remove()
        routes = np.concatenate([chosen[layer].reshape(count, -1) for layer in range(len(hooks))], axis=1)
        experts._given = experts._experts(routes, str(model.device))  # noqa: SLF001  nobody else gives without a layout
        given = model(input_ids=ids, use_cache=False).logits.float()
        experts._given = []  # noqa: SLF001
    return float((own - given).abs().max() / own.abs().max().clamp(min=1.0))
