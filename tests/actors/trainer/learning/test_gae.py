"""Advantages of tokens against numbers worked out by hand and against the formulas as published, a token at a time."""

from __future__ import annotations

import math

import numpy as np
import pytest

from actors.trainer.learning.step_estimates import explained_variance, generalised, kl_shaped, whitened


def rows(*lines: list[float]) -> np.ndarray:
    """float64[n, t]; shorter lines end with zeros."""
    width = max(map(len, lines))
    return np.array([line + [0.0] * (width - len(line)) for line in lines])


def test_the_score_stands_at_the_last_token_and_each_token_pays_for_its_distance_from_the_reference() -> None:
    """Ziegler et al. 2019, equation 2: R = r - beta log(pi / rho), here 1 - 0.1 · (0.5, -0.2, 0.3) and so on."""
    rewards = kl_shaped(np.array([1.0, -2.0]), np.array([3, 1]), rows([0.5, -0.2, 0.3], [0.4]), 0.1)
    np.testing.assert_allclose(rewards, rows([-0.05, 0.02, 0.97], [-2.04]))
    without = kl_shaped(np.array([1.0, -2.0]), np.array([3, 1]), None, 0.1)
    np.testing.assert_array_equal(without, rows([0.0, 0.0, 1.0], [-2.0]))


def test_generalised_advantages_by_hand() -> None:
    """Rewards 0, 0, 1; values 0.5, 0.4, 0.2; gamma 0.9, lambda 0.5.

    delta_2 = 1 - 0.2 = 0.8
    delta_1 = 0.9 · 0.2 - 0.4 = -0.22        A_1 = -0.22 + 0.45 · 0.8    = 0.14
    delta_0 = 0.9 · 0.4 - 0.5 = -0.14        A_0 = -0.14 + 0.45 · 0.14   = -0.077
    The second response, of one token: A = 2 - 0.3.
    """
    found = generalised(rows([0.0, 0.0, 1.0], [2.0]), rows([0.5, 0.4, 0.2], [0.3]), gamma=0.9, gae_lambda=0.5)
    np.testing.assert_allclose(found, rows([-0.077, 0.14, 0.8], [1.7]))


def test_lambda_one_is_what_came_less_what_was_expected_and_lambda_zero_one_step_of_it() -> None:
    rewards, values = rows([0.1, -0.2, 1.0]), rows([0.3, 0.6, 0.5])
    np.testing.assert_allclose(
        generalised(rewards, values, gamma=1.0, gae_lambda=1.0), rows([0.9 - 0.3, 0.8 - 0.6, 1.0 - 0.5])
    )
    np.testing.assert_allclose(
        generalised(rewards, values, gamma=1.0, gae_lambda=0.0), rows([0.1 + 0.6 - 0.3, -0.2 + 0.5 - 0.6, 1.0 - 0.5])
    )


def as_trl(
    score: float,
    logprobs: list[float],
    reference: list[float],
    values: list[float],
    beta: float,
    gamma: float,
    lam: float,
) -> tuple[list[float], list[float]]:
    """(advantages, returns) of one response as TRL's ``PPOTrainer`` computes them, loop by loop.

    Source: trl/trainer/ppo_trainer.py: "4. compute rewards" (``kl = logprobs - ref_logprobs`` for ``kl_estimator``
    k1, ``non_score_reward = -args.kl_coef * kl``, the score added at the last token) and "6. compute advantages and
    returns" (``for t in reversed(range(gen_length))``).
    """
    length = len(values)
    rewards = [-beta * (logprobs[t] - reference[t]) for t in range(length)]
    rewards[length - 1] += score
    lastgaelam, reversed_advantages = 0.0, list[float]()
    for t in range(length - 1, -1, -1):
        nextvalues = values[t + 1] if t < length - 1 else 0.0
        delta = rewards[t] + gamma * nextvalues - values[t]
        lastgaelam = delta + gamma * lam * lastgaelam
        reversed_advantages.append(lastgaelam)
    advantages = reversed_advantages[::-1]
    return advantages, [a + v for a, v in zip(advantages, values, strict=True)]


def test_rewards_advantages_and_returns_are_those_of_trl() -> None:
    rng = np.random.default_rng(0)
    lengths = [7, 1, 4, 12]
    logprobs, reference, values = ([list(rng.normal(size=n)) for n in lengths] for _ in range(3))
    scores = rng.normal(size=len(lengths))
    shaped = kl_shaped(scores, np.array(lengths), rows(*logprobs) - rows(*reference), 0.05)
    found = generalised(shaped, rows(*values), gamma=0.98, gae_lambda=0.9)
    for row, length in enumerate(lengths):
        advantages, returns = as_trl(scores[row], logprobs[row], reference[row], values[row], 0.05, 0.98, 0.9)
        np.testing.assert_allclose(found[row, :length], advantages)
        np.testing.assert_allclose((found + rows(*values))[row, :length], returns)
        assert not found[row, length:].any()


def test_whitening_is_over_all_tokens_of_the_step_and_leaves_padding_alone() -> None:
    """Tokens 1, 2, 3 and 6: mean 3, sample variance 14 / 3."""
    where = np.array([[True, True, True], [True, False, False]])
    found = whitened(rows([1.0, 2.0, 3.0], [6.0]), where)
    np.testing.assert_allclose(found, rows([-2.0, -1.0, 0.0], [3.0]) / math.sqrt(14 / 3), rtol=1e-6)
    assert not whitened(rows([5.0]), np.array([[True]])).any()


def test_explained_variance_is_one_for_a_perfect_critic_zero_for_a_constant_one_and_negative_for_a_worse_one() -> None:
    returns = np.array([1.0, 2.0, 3.0])
    assert explained_variance(returns, returns) == 1.0
    assert explained_variance(returns, np.full(3, 9.0)) == 0.0
    assert explained_variance(returns, -returns) == pytest.approx(-3.0)
    assert math.isnan(explained_variance(np.ones(3), returns))
