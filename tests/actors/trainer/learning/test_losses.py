"""Losses against values computed by hand and against finite differences."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch

from actors.trainer.backend import LossSpec
from actors.trainer.learning.losses import (
    NUMERICS,
    TokenColumns,
    kl_k3,
    policy_surrogate,
    token_losses,
    truncated_ratio,
    value_losses,
)

SPEC = LossSpec(clip_low=0.2, clip_high=0.3, importance_cap=2.0)


def column(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


def log_ratios(*ratios: float) -> torch.Tensor:
    return torch.log(column(*ratios)).requires_grad_(True)


def columns(
    new: torch.Tensor,
    engine: torch.Tensor,
    advantages: torch.Tensor,
    stale: torch.Tensor,
    reference: torch.Tensor | None = None,
) -> TokenColumns:
    """One sequence, in a step of one update."""
    where = torch.ones(1, len(new), dtype=torch.bool)
    return TokenColumns(new=new, engine=engine, advantages=advantages, stale=stale, where=where, reference=reference)


def gradient_of_surrogate(ratio: float, advantage: float, *, stale: bool) -> tuple[float, float, bool]:
    """(value, gradient with respect to the log-probability, clipped)."""
    new = log_ratios(ratio)
    value, clipped, _ = policy_surrogate(columns(new, column(0.0), column(advantage), torch.tensor([stale])), SPEC)
    (gradient,) = torch.autograd.grad(value.sum(), new)
    return value.item(), gradient.item(), bool(clipped.item())


def test_truncated_ratio_is_the_ratio_up_to_the_cap_and_its_slope_never_exceeds_the_cap() -> None:
    log_ratio = log_ratios(0.5, 1.0, 2.0, 4.0)
    value = truncated_ratio(log_ratio, 2.0)
    torch.testing.assert_close(value.detach(), column(0.5, 1.0, 2.0, 2.0 * (1 + math.log(2.0))))
    (slope,) = torch.autograd.grad(value.sum(), log_ratio)
    torch.testing.assert_close(slope, column(0.5, 1.0, 2.0, 2.0))


@pytest.mark.parametrize("advantage", [2.0, -2.0])
def test_on_policy_the_gradient_is_the_plain_policy_gradient(advantage: float) -> None:
    for stale in (False, True):
        value, gradient, clipped = gradient_of_surrogate(1.0, advantage, stale=stale)
        assert (value, gradient, clipped) == (advantage, advantage, False)


@pytest.mark.parametrize(
    ("ratio", "advantage", "value", "gradient", "clipped"),
    [
        (1.25, 2.0, 2.5, 2.5, False),  # inside 1 + 0.3
        (1.5, 2.0, 2.6, 0.0, True),  # 1.3 * 2
        (0.5, 2.0, 1.0, 1.0, False),  # the clip never helps a token that became less likely and was good
        (0.9, -2.0, -1.8, -1.8, False),
        (0.5, -2.0, -1.6, 0.0, True),  # 0.8 * -2
        (1.5, -2.0, -3.0, -3.0, False),
        (4.0, -2.0, -4.0 * (1 + math.log(2.0)), -4.0, False),  # truncated at 2
    ],
)
def test_stale_tokens_are_clipped_as_in_ppo_and_truncated_at_the_cap(
    ratio: float, advantage: float, value: float, gradient: float, clipped: bool
) -> None:
    assert gradient_of_surrogate(ratio, advantage, stale=True) == pytest.approx((value, gradient, clipped))


@pytest.mark.parametrize("ratio", [0.5, 1.5, 1.9])
def test_fresh_tokens_are_weighted_but_never_clipped(ratio: float) -> None:
    value, gradient, clipped = gradient_of_surrogate(ratio, 1.0, stale=False)
    assert (value, gradient, clipped) == pytest.approx((ratio, ratio, False))


def test_an_absurd_ratio_gives_a_finite_loss_and_a_gradient_no_larger_than_the_cap() -> None:
    for gap in (1e4, -1e4):
        new = column(gap).requires_grad_(True)
        value, _, _ = policy_surrogate(columns(new, column(0.0), column(-1.0), torch.tensor([True])), SPEC)
        (gradient,) = torch.autograd.grad(value.sum(), new)
        assert math.isfinite(value.item())
        assert abs(gradient.item()) <= SPEC.importance_cap


def gradient_of_loss(new: torch.Tensor, behaviour: torch.Tensor, stale: torch.Tensor) -> torch.Tensor:
    new = new.clone().requires_grad_(True)
    advantages = torch.linspace(-2.0, 2.0, len(new))
    losses = token_losses(columns(new, behaviour, advantages, stale), SPEC)
    return torch.autograd.grad(losses.loss.sum(), new)[0]


def test_the_last_bits_of_an_engines_log_probabilities_leave_no_trace_in_the_gradient_of_fresh_tokens() -> None:
    """Which depend on what else was in the engine's batch: so a moved sample teaches the same, to the last bit."""
    draw = torch.Generator().manual_seed(0)
    new = -5.0 * torch.rand(1000, generator=draw)
    noise = 2e-6 * torch.randn(1000, generator=draw)
    fresh, stale = torch.zeros(1000, dtype=torch.bool), torch.ones(1000, dtype=torch.bool)
    assert torch.equal(gradient_of_loss(new, new + noise, fresh), gradient_of_loss(new, new.clone(), fresh))
    assert not torch.equal(gradient_of_loss(new, new + noise, stale), gradient_of_loss(new, new.clone(), stale))


def test_a_fresh_token_that_differs_by_more_than_numerics_is_weighted_by_its_ratio() -> None:
    new, behaviour = torch.tensor([-1.0, -1.0]), torch.tensor([-1.0 + 2 * NUMERICS, -1.0 + NUMERICS / 2])
    gradient = gradient_of_loss(new, behaviour, torch.zeros(2, dtype=torch.bool))
    ratio = math.exp(-2 * NUMERICS)
    torch.testing.assert_close(gradient, torch.tensor([2.0 * ratio, -2.0]), rtol=0.0, atol=1e-6)
    assert abs(gradient[0].item() - 2.0) > NUMERICS
    mismatch = token_losses(columns(new, behaviour, new, torch.zeros(2, dtype=torch.bool)), SPEC).mismatch
    torch.testing.assert_close(mismatch, torch.tensor([2 * NUMERICS, NUMERICS / 2]), rtol=0.0, atol=1e-6)


def test_k3_is_zero_where_the_models_agree_and_positive_elsewhere() -> None:
    # d = ln 2: 2 - ln 2 - 1
    value = kl_k3(column(0.0, math.log(0.5)), column(0.0, 0.0))
    torch.testing.assert_close(value, column(0.0, 1.0 - math.log(2.0)))
    assert (kl_k3(torch.randn(100), torch.randn(100)) >= 0).all()


def test_the_kl_term_joins_the_loss_with_its_coefficient_and_is_reported_without_it() -> None:
    new, zero = column(math.log(0.5)), column(0.0)
    spec = LossSpec(kl_coefficient=0.1)
    losses = token_losses(columns(new, new, column(3.0), torch.tensor([False]), zero), spec)
    k3 = 1.0 - math.log(2.0)
    torch.testing.assert_close(losses.loss, column(-3.0 + 0.1 * k3))
    torch.testing.assert_close(losses.kl, column(k3))


def test_mismatch_is_the_distance_between_trainer_and_engine() -> None:
    losses = token_losses(
        columns(column(-1.0, -2.0), column(-1.5, -1.0), column(1.0, 1.0), torch.tensor([False, True])), SPEC
    )
    torch.testing.assert_close(losses.mismatch, column(0.5, 1.0))


def test_what_earlier_updates_of_a_step_have_moved_is_no_mismatch() -> None:
    moved = dataclasses.replace(
        columns(column(-3.0), column(-1.0), column(-1.0), torch.ones(1, dtype=torch.bool)), old=column(-1.25)
    )
    torch.testing.assert_close(token_losses(moved, SPEC).mismatch, column(0.25))


def test_value_losses_by_hand() -> None:
    """Clip 0.2. Old 1.0, R 2.0: V 1.1 → 0.81 / 2; V 1.5 clipped to 1.2 → max(0.25, 0.64) / 2, no gradient.

    V 0.5 clipped to 0.8 → max(2.25, 1.44) / 2, on its way back. V 2.5 clipped to 1.2 → max(0.25, 0.64) / 2.
    """
    values = column(1.1, 1.5, 0.5, 2.5).requires_grad_(True)
    losses, clipped = value_losses(values, column(1.0, 1.0, 1.0, 1.0), torch.full((4,), 2.0).double(), 0.2)
    torch.testing.assert_close(losses.detach(), column(0.405, 0.32, 1.125, 0.32))
    assert clipped.tolist() == [0.0, 1.0, 0.0, 1.0]
    (gradient,) = torch.autograd.grad(losses.sum(), values)
    torch.testing.assert_close(gradient, column(-0.9, 0.0, -1.5, 0.0))
    plain, never = value_losses(values, values.detach(), torch.full((4,), 2.0).double(), 0.0)
    torch.testing.assert_close(plain.detach(), column(0.405, 0.125, 1.125, 0.125))
    assert not never.any()


def test_value_losses_are_those_of_trl() -> None:
    """``vpredclipped``, ``vf_losses1`` and ``vf_losses2`` of trl/trainer/ppo_trainer.py, a token at a time."""
    draw = torch.Generator().manual_seed(0)
    values, old, returns = (torch.randn(50, generator=draw, dtype=torch.float64) for _ in range(3))
    losses, clipped = value_losses(values, old, returns, 0.3)
    for v, o, r, loss, was in zip(*(x.tolist() for x in (values, old, returns, losses, clipped)), strict=True):
        vpredclipped = min(max(v, o - 0.3), o + 0.3)
        assert loss == pytest.approx(0.5 * max((v - r) ** 2, (vpredclipped - r) ** 2))
        assert bool(was) == ((vpredclipped - r) ** 2 > (v - r) ** 2)


@pytest.mark.parametrize("stale", [True, False])
def test_the_loss_passes_a_finite_difference_check_away_from_its_kinks(stale: bool) -> None:
    new = log_ratios(0.5, 0.9, 1.1, 1.6, 3.0, 0.6)
    advantages, reference = column(1.0, -1.0, 2.0, -0.5, -1.0, -2.0), column(-0.1, 0.2, 0.0, 0.3, 0.1, -0.4)
    spec = LossSpec(kl_coefficient=0.05)

    def loss(logprobs: torch.Tensor) -> torch.Tensor:
        flags = torch.full((6,), stale)
        return token_losses(columns(logprobs, torch.zeros_like(logprobs), advantages, flags, reference), spec).loss

    assert torch.autograd.gradcheck(loss, (new,))
