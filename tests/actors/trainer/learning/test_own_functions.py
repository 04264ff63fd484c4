"""Losses and advantages that a job file names: what they get, and what becomes of what they do."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from actors.trainer.backend import LossSpec
from actors.trainer.errors import OwnFunctionFailed
from actors.trainer.learning.losses import TokenColumns, token_losses
from actors.trainer.learning.own_functions import own_advantages, own_loss
from actors.trainer.learning.rules import LearningRule
from configs.learning_schema import AlgorithmConfig

HERE = "tests.actors.trainer.own_code"


def columns() -> TokenColumns:
    new = torch.tensor([-1.0, -2.0, -0.5], requires_grad=True)
    advantages, stale = torch.tensor([1.0, -1.0, 2.0]), torch.zeros(3, dtype=torch.bool)
    reference = torch.tensor([-1.0, -1.0, -1.0])
    where = torch.ones(1, 3, dtype=torch.bool)
    return TokenColumns(
        new=new, engine=new.detach(), advantages=advantages, stale=stale, where=where, reference=reference
    )


def test_an_own_loss_takes_the_place_of_the_surrogate_and_the_kl_term_is_added() -> None:
    given, spec = columns(), LossSpec(kl_coefficient=0.5)
    losses = token_losses(given, spec, own_loss(f"{HERE}:reinforce"))
    expected = -given.advantages * given.new + 0.5 * (torch.exp(-1.0 - given.new) - (-1.0 - given.new) - 1.0)
    torch.testing.assert_close(losses.loss, expected)
    assert losses.loss.requires_grad


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("mean", r"returned a Tensor of shape \(\); expected a tensor of shape \(3,\)"),
        ("without_gradient", "without gradient; compute them from columns.new"),
        ("raising", r"raised RuntimeError: no such thing \(own_code.py:\d+\); mend it"),
        ("ranks", "raised"),
        ("leaving", "raised SystemExit"),
    ],
)
def test_a_loss_that_gives_no_losses_is_named_with_what_it_did(name: str, why: str) -> None:
    with pytest.raises(OwnFunctionFailed, match=why) as caught:
        own_loss(f"{HERE}:{name}")(columns(), LossSpec())
    assert str(caught.value).startswith(f"algorithm.loss {HERE}:{name} (own_code.py:")
    assert caught.value.permanent


def test_an_own_advantage_sees_rewards_with_their_penalty_and_the_lengths() -> None:
    algorithm = AlgorithmConfig(advantage=f"{HERE}:ranks", overlong={"buffer_tokens": 10})  # type: ignore[arg-type]
    rule = LearningRule(algorithm, 20)
    # 1 - 0.1 and 1 - 1 - 0.2
    np.testing.assert_allclose(rule.advantages(np.ones(2), np.array([10, 20])), [0.55, -0.55])


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("too_few", "shape"),
        ("infinite", "2 numbers that are not finite for 2 rewards"),
        ("words", "returned a str"),
        ("raising", "no such thing"),
    ],
)
def test_an_advantage_that_is_none_is_named_with_what_it_did(name: str, why: str) -> None:
    with pytest.raises(OwnFunctionFailed, match=why):
        own_advantages(f"{HERE}:{name}")(np.array([1.0, 0.0]), np.array([3, 4]))


@pytest.mark.parametrize("path", ["no.such.module:f", f"{HERE}:nothing", f"{HERE}:not_a_function"])
def test_what_cannot_be_imported_is_named(path: str) -> None:
    with pytest.raises(OwnFunctionFailed, match=f"algorithm.advantage '{path}'"):
        own_advantages(path)
