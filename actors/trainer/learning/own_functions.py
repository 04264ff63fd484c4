"""Functions of the user's own, named ``package.module:function`` by ``algorithm.advantage`` and ``algorithm.loss``.

    advantage(rewards float64[g], lengths int64[g]) -> float64[g]         one group: its siblings, in their order
    loss(columns TokenColumns, spec LossSpec) -> float32[n] with gradient     one micro-batch: n tokens of the model

``rewards`` include the overlong penalty, if there is one, and ``lengths`` count tokens of the model. The result is
each response's advantage, or, if the rule whitens, its score. ``TokenColumns`` is in ``losses.py``; the backend
weighs and sums the losses, and adds the KL term and the entropy bonus.

Both must depend on their arguments alone: a step that is replayed calls them again. An error that they raise, or a
result of the wrong shape or type, ends the run with OwnFunctionFailed, which says where in the user's code it was.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from actors.host.allowed_code import why_not_allowed
from actors.host.user_code import defined_at, described
from actors.trainer.errors import OwnFunctionFailed

if TYPE_CHECKING:
    from torch import Tensor

    from actors.protocol.training import LossSpec
    from actors.trainer.learning.losses import PolicyLoss, TokenColumns

GroupAdvantages = Callable[[np.ndarray, np.ndarray], np.ndarray]
"""Rewards float64[g] and lengths int64[g] of one group to its advantages float64[g]."""


def own_advantages(path: str) -> GroupAdvantages:
    """The function that ``algorithm.advantage`` names, with its results checked.

    Raises:
        OwnFunctionFailed: it cannot be imported.
    """
    function, whose = _loaded(path, "algorithm.advantage")

    def advantages(rewards: np.ndarray, lengths: np.ndarray) -> np.ndarray:
        found = _called(whose, function, rewards.copy(), lengths.copy())
        try:
            values = np.asarray(found, dtype=np.float64)
        except (TypeError, ValueError) as error:
            raise OwnFunctionFailed(f"{whose} returned a {type(found).__name__}, expected float64[g]") from error
        if values.shape != rewards.shape or not np.isfinite(values).all():
            raise OwnFunctionFailed(
                f"{whose} returned shape {values.shape} with {int((~np.isfinite(values)).sum())} numbers that are not "
                f"finite for {len(rewards)} rewards; expected one finite number for each"
            )
        return values

    return advantages


@functools.cache
def own_loss(path: str) -> PolicyLoss:
    """The function that ``algorithm.loss`` names, with its results checked; or ours of that name.

    Raises:
        OwnFunctionFailed: it cannot be imported.
    """
    import torch

    from actors.trainer.learning.explicit_losses import EXPLICIT_LOSSES

    if path in EXPLICIT_LOSSES:
        return EXPLICIT_LOSSES[path]

    function, whose = _loaded(path, "algorithm.loss")

    def loss(columns: TokenColumns, spec: LossSpec) -> Tensor:
        found = _called(whose, function, columns, spec)
        if not isinstance(found, torch.Tensor) or found.shape != columns.new.shape:
            shape = f" of shape {tuple(found.shape)}" if isinstance(found, torch.Tensor) else ""
            wrong = f"{whose} returned a {type(found).__name__}{shape}"
            raise OwnFunctionFailed(f"{wrong}; expected a tensor of shape {tuple(columns.new.shape)}, one loss a token")
        if columns.new.requires_grad and not found.requires_grad:
            raise OwnFunctionFailed(f"{whose} returned losses without gradient; compute them from columns.new")
        return found.to(columns.new.dtype)

    return loss


def _loaded(path: str, key: str) -> tuple[Callable[..., Any], str]:
    """(the function, its name in messages)."""
    if wrong := why_not_allowed(path):
        raise OwnFunctionFailed(f"{key} {wrong}")
    module, _, name = path.partition(":")
    try:
        function = getattr(importlib.import_module(module), name)
    except (Exception, SystemExit) as error:
        wrong = f"{key} {path!r} cannot be imported: {described(error)}"
        raise OwnFunctionFailed(f"{wrong}; expected 'package.module:function'") from error
    if not callable(function):
        raise OwnFunctionFailed(f"{key} {path!r} is a {type(function).__name__}, expected a function")
    return cast("Callable[..., Any]", function), f"{key} {path} ({defined_at(function)})"


def _called(whose: str, function: Callable[..., Any], *arguments: object) -> Any:
    try:
        return function(*arguments)
    except (Exception, SystemExit) as error:
        from actors.trainer.backends.out_of_memory import is_out_of_memory  # torch is there where a loss is called

        if is_out_of_memory(error):
            raise  # the micro-batch is halved, as if ours had found none
        raise OwnFunctionFailed(f"{whose} raised {described(error)}; mend it and resume the run") from error
