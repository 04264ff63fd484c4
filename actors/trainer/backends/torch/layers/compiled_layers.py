"""Layers of a model by ``torch.compile``, one by one; attention, embeddings and the head stay as they are.

    layer ─ recompute ─▶ compiled: norm, projections ─▶ attention (ours, outside of any graph) ─▶ compiled: the rest

Layers of one kind share what is compiled, and so do models of one process. A new length of row compiles nothing, since
lengths are symbols. What does is another *form* of a call: one row or several, with a tree or without, and on a CPU
rows that are long enough to be summed in pieces. After ``FORMS_MAX`` forms of a layer others are computed as written.

Invariants
- At the start examples go both ways, log-probabilities and gradients. Where they differ, or nothing can be compiled,
  the model computes as without this, and people are told so. The same if a form cannot be compiled later.
- What is scored is what is trained, bit for bit: without gradients a trained layer runs the same code, and its
  activations are let go at its end.
- Nothing is chosen by a measurement, so two runs from one seed compile the same and give the same bits.
- All calls of a model come from one thread at a time; torch compiles on no other.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Sequence
from typing import Any, Final

import structlog
import torch
from torch import Tensor, nn

from actors.trainer.backends.torch.attention.row_attention import stay_uncompiled
from actors.trainer.backends.torch.recompute import outermost_layers
from actors.trainer.errors import ModelNotLoadable

log = structlog.get_logger("headrace.trainer")

FORMS_MAX: Final = 16
_ATTRIBUTE: Final = "headrace_compiled"
_BACKEND: Final = "inductor"
"""What torch compiles with; a test has one that takes less time."""
_APART_MAX: Final = {torch.float32: 1e-4}
_APART_MAX_HALF: Final = 0.1
"""Most that both ways may be apart on an example, of the largest logit and of the norm of all gradients."""

_LOOKS_AT_GRAD: Final = "The .grad attribute of a Tensor that is not a leaf"
"""What torch warns of when it looks at the arguments of what it compiles."""

Answer = tuple[Tensor, Sequence[Tensor]]
"""Numbers of an example's tokens, and the gradients of their sum by ``Compiled.parameters``."""


class Compiled:
    """Whether the layers of one model run compiled. ``layers``: all of them."""

    def __init__(self, model: str, layers: list[nn.Module]) -> None:
        self._model = model
        self._layers = layers
        self.on = False
        self.is_trying = False

    @property
    def parameters(self) -> list[nn.Parameter]:
        """What is trained of the layers."""
        return [own for layer in self._layers for own in layer.parameters() if own.requires_grad]

    def try_on(self, answers: Sequence[Callable[[], Answer]]) -> None:
        """Run compiled from now on, if each example is answered as without."""
        self.is_trying = True
        why = next(filter(None, map(self._why_not, answers)), "")
        self.is_trying = False
        self.on = not why
        if why:
            self.tell(why)

    def _why_not(self, answer: Callable[[], Answer]) -> str:
        self.on = False
        wanted = answer()
        self.on = True
        try:
            return _why_apart(wanted, answer())
        except Exception as error:  # noqa: BLE001  whatever compiled code raises; layers as written go on
            return f"{type(error).__name__}: {error}"

    def tell(self, why: str) -> None:
        """Say why layers are computed as written."""
        _tell(self._model, " ".join(why.split("\n")[:2]))  # torch says what it was about first, then why


def compile_layers(model: nn.Module) -> None:
    """Let the layers of ``model`` run compiled, once ``Compiled.try_on`` has found that they may.

    Raises:
        ModelNotLoadable: the model has no such layers.
    """
    layers = outermost_layers(model)
    if not layers:
        raise ModelNotLoadable(f"trainer.compile: {type(model).__name__} has no layers that are known here; unset it")
    _prepare_torch()
    stay_uncompiled()
    state = Compiled(type(model).__name__, layers)
    setattr(model, _ATTRIBUTE, state)
    for layer in layers:
        layer.forward = _by(state, layer)


def compiled_layers(model: nn.Module) -> Compiled | None:
    """What ``compile_layers`` has put at ``model``, if anything."""
    return getattr(model, _ATTRIBUTE, None)


def _prepare_torch() -> None:
    """Settings of this process, which compiles nothing else."""
    import torch._functorch.config as functorch
    import torch.fx.experimental._config as shapes

    functorch.force_non_lazy_backward_lowering = True  # so that all that can fail does so in the forward pass
    shapes.use_duck_shape = False  # two lengths that are equal in the example need not be so later
    warnings.filterwarnings("ignore", message=_LOOKS_AT_GRAD, category=UserWarning)


def _by(state: Compiled, layer: nn.Module) -> Callable[..., Any]:
    from torch._dynamo.exc import TorchDynamoException

    plain = layer.forward
    options = {"deterministic": True, "cpp.threads": torch.get_num_threads()}
    compile_it: Any = torch.compile  # its overloads know no ``recompile_limit``
    compiled = compile_it(plain, backend=_BACKEND, dynamic=True, recompile_limit=FORMS_MAX, options=options)
    failed = False

    @functools.wraps(plain)
    def call(*args: Any, **kwargs: Any) -> Any:
        nonlocal failed
        if failed or not state.on:
            return plain(*args, **kwargs)
        try:
            if any(own.requires_grad for own in layer.parameters()):
                return _as_trained(compiled, *args, **kwargs)
            return compiled(*args, **kwargs)
        except TorchDynamoException as error:
            if state.is_trying:
                raise
            failed = True  # of this layer alone: one that is computed again must do as it did
            state.tell(f"{type(error).__name__}: {error}")
            return plain(*args, **kwargs)

    return call


def _as_trained(compiled: Callable[..., Any], hidden: Tensor, *args: Any, **kwargs: Any) -> Any:
    """The layer's result by the code that also computes gradients, whether any are wanted or not."""
    learns = torch.is_grad_enabled()
    with torch.enable_grad():
        if not hidden.requires_grad:
            hidden = hidden.detach().requires_grad_()
        result = compiled(hidden, *args, **kwargs)
    if learns:
        return result
    return result.detach() if isinstance(result, Tensor) else tuple(one.detach() for one in result)


def _why_apart(wanted: Answer, found: Answer) -> str:
    """What differs more than rounding explains; empty: nothing."""
    (numbers, gradients), (own_numbers, own_gradients) = wanted, found
    tolerance = _APART_MAX.get(gradients[0].dtype if gradients else numbers.dtype, _APART_MAX_HALF)
    apart = float((numbers - own_numbers).abs().max() / numbers.abs().max().clamp(min=1.0))
    if not apart < tolerance:
        return f"its log-probabilities are up to {apart:.2g} of the largest logit off"
    apart = _norm([one - other for one, other in zip(gradients, own_gradients, strict=True)])
    apart /= max(_norm(gradients), 1e-30)
    return "" if apart < tolerance else f"its gradients are {apart:.2g} of their norm off"


def _norm(tensors: Sequence[Tensor]) -> float:
    return float(torch.stack([one.float().norm() for one in tensors]).norm()) if tensors else 0.0


@functools.cache
def _tell(model: str, why: str) -> None:
    """Once for all models of a kind in this process."""
    log.warning("trainer.compile: the layers are computed as written, not compiled", model=model, why=why)
