"""Each named loss against its published formula, in values and in gradients, one sequence at a time."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from actors.protocol.datums import LOSS_INPUTS
from actors.trainer.learning.datum_batches import explicit_loss
from actors.trainer.learning.explicit_losses import EXPLICIT_LOSSES
from actors.trainer.learning.losses import TokenColumns
from actors.trainer.learning.own_functions import own_loss

LENGTHS = (5, 1, 7)
GIVEN = {"dro": {"beta": 0.3}, "cispo": {"clip_low_threshold": 0.95, "clip_high_threshold": 1.05}}


def cross_entropy(new: Tensor, q: Tensor, gain: Tensor, mask: Tensor) -> Tensor:
    return -new


def importance_sampling(new: Tensor, q: Tensor, gain: Tensor, mask: Tensor) -> Tensor:
    return -(new - q).exp() * gain


def ppo(new: Tensor, q: Tensor, gain: Tensor, mask: Tensor) -> Tensor:
    ratio = (new - q).exp()
    return -torch.min(ratio * gain, ratio.clamp(0.8, 1.2) * gain)


def cispo(new: Tensor, q: Tensor, gain: Tensor, mask: Tensor) -> Tensor:
    return -(new - q).exp().clamp(0.95, 1.05).detach() * new * gain


def dro(new: Tensor, q: Tensor, gain: Tensor, mask: Tensor) -> Tensor:
    return -(new * gain - 0.5 * 0.3 * (new - q) ** 2)


def gspo(new: Tensor, q: Tensor, gain: Tensor, mask: Tensor) -> Tensor:
    ratio = ((new.detach() - q)[mask != 0].mean() + new - new.detach()).exp()
    return -torch.min(ratio * gain, ratio.clamp(0.8, 1.2) * gain)


FORMULAS: dict[str, Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]] = {
    function.__name__: function for function in (cross_entropy, importance_sampling, ppo, cispo, dro, gspo)
}


def columns() -> TokenColumns:
    draw = torch.Generator().manual_seed(0)
    count = sum(LENGTHS)
    new, noise, gain, mask = (torch.randn(count, generator=draw) for _ in range(4))
    where = torch.arange(9) < torch.tensor(LENGTHS)[:, None]
    mask = (mask > 0).float()
    mask[[0, 5, 6]] = 1.0  # at least one of each sequence
    gain[[1, 8]] = 0.0
    return TokenColumns(
        new=new.requires_grad_(),
        engine=new.detach() + 0.4 * noise,
        advantages=gain,
        stale=torch.ones(count, dtype=torch.bool),
        where=where,
        ratio_mask=mask,
    )


def test_all_losses_that_datums_may_name_are_there() -> None:
    assert set(EXPLICIT_LOSSES) == set(LOSS_INPUTS) == set(FORMULAS)
    assert all(own_loss(name) is function for name, function in EXPLICIT_LOSSES.items())


@pytest.mark.parametrize("name", sorted(EXPLICIT_LOSSES))
def test_a_loss_and_its_gradient_are_those_of_the_formula(name: str) -> None:
    given = columns()
    assert given.ratio_mask is not None
    found = EXPLICIT_LOSSES[name](given, explicit_loss(name, GIVEN.get(name, {})))
    (gradient,) = torch.autograd.grad(found.sum(), given.new)
    parts = zip(*(c.split(LENGTHS) for c in (given.new, given.engine, given.advantages, given.ratio_mask)), strict=True)
    expected = torch.cat([FORMULAS[name](*part) for part in parts])
    (wanted,) = torch.autograd.grad(expected.sum(), given.new)
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(gradient, wanted)


@pytest.mark.parametrize("name", ["importance_sampling", "ppo", "cispo"])
def test_any_filler_in_place_of_a_log_probability_is_harmless_where_there_is_no_advantage(name: str) -> None:
    given = columns()
    given.engine[1] = -500.0
    found = EXPLICIT_LOSSES[name](given, explicit_loss(name, {}))
    (gradient,) = torch.autograd.grad(found.sum(), given.new)
    assert found[1] == 0
    assert gradient[1] == 0
    assert gradient.isfinite().all()
