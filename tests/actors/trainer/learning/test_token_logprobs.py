"""Log-probabilities and entropies of tokens against torch's own, and their gradients."""

from __future__ import annotations

import math

import pytest
import torch

from actors.trainer.learning.token_logprobs import TokenLogprobs, token_logprobs


@pytest.mark.parametrize("temperature", [1.0, 0.7, 2.0])
def test_token_logprobs_agree_with_log_softmax_and_so_do_their_gradients(temperature: float) -> None:
    torch.manual_seed(0)
    logits = torch.randn(7, 11, requires_grad=True)
    targets, weight = torch.randint(0, 11, (7,)), torch.randn(7)
    ours, entropy = token_logprobs(logits, targets, temperature)
    (gradient,) = torch.autograd.grad((ours * weight).sum(), logits)
    full = torch.log_softmax(logits / temperature, dim=-1)
    expected = full.gather(-1, targets[:, None])[:, 0]
    (expected_gradient,) = torch.autograd.grad((expected * weight).sum(), logits)
    torch.testing.assert_close(ours, expected)
    torch.testing.assert_close(gradient, expected_gradient)
    torch.testing.assert_close(entropy, -(full.exp() * full).sum(-1))


def test_blocks_of_rows_do_not_change_the_result(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    logits, targets = torch.randn(9, 5, requires_grad=True), torch.randint(0, 5, (9,))
    whole = token_logprobs(logits, targets, 0.9)[0]
    (whole_gradient,) = torch.autograd.grad(whole.sum(), logits)
    monkeypatch.setattr(TokenLogprobs, "ELEMENTS", 10)
    parts = token_logprobs(logits, targets, 0.9)[0]
    (parts_gradient,) = torch.autograd.grad(parts.sum(), logits)
    torch.testing.assert_close(whole, parts, rtol=0, atol=0)
    torch.testing.assert_close(whole_gradient, parts_gradient, rtol=0, atol=0)


@pytest.mark.parametrize("block_elements", [1 << 24, 10])
def test_tokens_that_share_a_row_of_logits_get_what_a_row_each_would_give(
    monkeypatch: pytest.MonkeyPatch, block_elements: int
) -> None:
    monkeypatch.setattr(TokenLogprobs, "ELEMENTS", block_elements)
    torch.manual_seed(0)
    logits, targets, weight = torch.randn(4, 5, requires_grad=True), torch.randint(0, 5, (9,)), torch.randn(9)
    rows = torch.tensor([0, 3, 1, 0, 2, 3, 3, 1, 0])
    shared = token_logprobs(logits, targets, 0.7, rows)
    (gradient,) = torch.autograd.grad((shared[0] * weight).sum(), logits)
    apart = token_logprobs(logits[rows], targets, 0.7)
    (expected,) = torch.autograd.grad((apart[0] * weight).sum(), logits)
    torch.testing.assert_close(shared, apart)
    torch.testing.assert_close(gradient, expected)


def test_tokens_that_a_model_masks_leave_the_entropy_finite() -> None:
    logits = torch.tensor([[0.0, 0.0, -math.inf]])
    logprobs, entropy = token_logprobs(logits, torch.tensor([1]), 1.0)
    torch.testing.assert_close(logprobs, torch.tensor([-math.log(2.0)]))
    torch.testing.assert_close(entropy, torch.tensor([math.log(2.0)]))


def test_tokens_that_share_a_row_give_the_same_bits_however_many_threads_add_them() -> None:
    """Torch's scattered additions are atomic from 32,768 entries on, in whatever order threads come."""
    generator, threads = torch.Generator().manual_seed(0), torch.get_num_threads()
    logits = torch.randn(50, 11, generator=generator)
    rows, targets = (torch.randint(0, most, (40_000,), generator=generator) for most in (50, 11))
    weight = torch.randn(40_000, generator=generator)
    torch.set_num_threads(2)
    try:
        gradients: list[torch.Tensor] = []
        for _ in range(20):
            leaf = logits.clone().requires_grad_()
            (token_logprobs(leaf, targets, 1.0, rows)[0] * weight).sum().backward()  # type: ignore[no-untyped-call]
            assert leaf.grad is not None
            gradients.append(leaf.grad)
    finally:
        torch.set_num_threads(threads)
    assert all(torch.equal(gradients[0], other) for other in gradients)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_an_entropy_bonus_has_the_gradient_of_the_entropy_beside_that_of_the_log_probabilities(
    temperature: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(TokenLogprobs, "ELEMENTS", 10)
    torch.manual_seed(0)
    logits = torch.randn(4, 5, requires_grad=True)
    rows, targets = torch.tensor([0, 3, 1, 0, 2, 3]), torch.randint(0, 5, (6,))
    weight, bonus = torch.randn(6), torch.randn(6)
    ours, entropies = token_logprobs(logits, targets, temperature, rows, learns_entropy=True)
    (gradient,) = torch.autograd.grad((ours * weight + entropies * bonus).sum(), logits)
    full = torch.log_softmax(logits / temperature, dim=-1)[rows]
    expected = full.gather(-1, targets[:, None])[:, 0] * weight - (full.exp() * full).sum(-1) * bonus
    torch.testing.assert_close(gradient, torch.autograd.grad(expected.sum(), logits)[0])


def test_masked_tokens_leave_the_gradient_of_an_entropy_finite() -> None:
    logits = torch.tensor([[0.0, 1.0, -math.inf]], requires_grad=True)
    _, entropy = token_logprobs(logits, torch.tensor([1]), 1.0, learns_entropy=True)
    (gradient,) = torch.autograd.grad(entropy.sum(), logits)
    assert torch.isfinite(gradient).all()
    assert gradient[0, 2] == 0.0
