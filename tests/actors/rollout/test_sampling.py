"""The noise of a token, and how tokens are drawn with it."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from actors.rollout.engines.torch.token_sampler import RowSampling, draw
from actors.rollout.sampling import stream_keys, uniforms

PINNED_KEYS = ["0x238275bc38fcbe91", "0x2f32a78496c67c60", "0x44e5b98100c67fb0"]
PINNED_UNIFORMS = [0.12964561829974752, 0.049920065672091396, 0.6703283700586792]


def test_noise_is_pinned_so_that_a_resumed_run_goes_on_with_the_same_tokens() -> None:
    keys = stream_keys(0, np.array([0, 0, 1]), np.array([0, 1, 0]))
    assert [hex(key) for key in keys.tolist()] == PINNED_KEYS
    assert uniforms(keys[:1], np.array([0, 1, 2])).tolist() == PINNED_UNIFORMS


def test_noise_does_not_depend_on_what_it_is_computed_together_with() -> None:
    prompts, siblings, positions = np.arange(50) // 5, np.arange(50) % 5, np.arange(50) * 3
    together = uniforms(stream_keys(9, prompts, siblings), positions)
    alone = [
        uniforms(stream_keys(9, int(p), int(s)), int(at))[0]
        for p, s, at in zip(prompts, siblings, positions, strict=True)
    ]
    assert together.tolist() == alone


@pytest.mark.parametrize("varied", ["seed", "prompt", "sibling", "position"])
def test_noise_is_uniform_and_uncorrelated_along_each_of_its_arguments(varied: str) -> None:
    n = 20_000
    count = np.arange(n)
    if varied == "seed":
        values = np.array([uniforms(stream_keys(seed, 3, 1), 5)[0] for seed in range(2000)])
    else:
        prompt = count if varied == "prompt" else 3
        sibling = count if varied == "sibling" else 1
        position = count if varied == "position" else 5
        values = uniforms(stream_keys(7, prompt, sibling), position)
    assert values.min() > 0
    assert values.max() < 1
    deviation = np.sort(values) - (np.arange(len(values)) + 0.5) / len(values)
    assert np.abs(deviation).max() < 1.95 / np.sqrt(len(values))  # Kolmogorov-Smirnov at 0.1 %
    assert abs(np.corrcoef(values[:-1], values[1:])[0, 1]) < 4 / np.sqrt(len(values))


def parameters(n: int, temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0) -> RowSampling:
    return RowSampling(np.full(n, temperature), np.full(n, top_p), np.full(n, top_k))


def test_tokens_are_drawn_in_proportion_to_their_probability_and_reported_with_it() -> None:
    logits = torch.tensor([0.1, 2.0, -1.0, 0.7, 1.3]).repeat(40_000, 1)
    noise = uniforms(stream_keys(1, 0, 0), np.arange(40_000))
    tokens, logprobs = draw(logits, noise, parameters(40_000, temperature=0.8))
    expected = (logits[0].double() / 0.8).softmax(-1).numpy()
    assert np.abs(np.bincount(tokens, minlength=5) / 40_000 - expected).max() < 0.01
    np.testing.assert_allclose(np.exp(logprobs), expected[tokens], rtol=1e-6)


def test_top_k_and_top_p_cut_the_tail_and_renormalise_what_stays() -> None:
    logits = torch.log(torch.tensor([[0.1, 0.4, 0.3, 0.15, 0.05]])).repeat(1000, 1)
    noise = uniforms(stream_keys(1, 0, 0), np.arange(1000))
    for sampling, kept in [
        (parameters(1000, top_k=2), {1: 4 / 7, 2: 3 / 7}),
        (parameters(1000, top_p=0.65), {1: 4 / 7, 2: 3 / 7}),
        (parameters(1000, top_p=0.01), {1: 1.0}),
        (parameters(1000, top_k=3, top_p=0.9), {1: 40 / 85, 2: 30 / 85, 3: 15 / 85}),
    ]:
        tokens, logprobs = draw(logits, noise, sampling)
        assert set(tokens.tolist()) == set(kept)
        np.testing.assert_allclose(np.exp(logprobs), [kept[token] for token in tokens.tolist()], rtol=1e-5)


def test_exactly_k_of_equal_logits_stay() -> None:
    tokens, logprobs = draw(
        torch.zeros(500, 10), uniforms(stream_keys(1, 0, 0), np.arange(500)), parameters(500, top_k=3)
    )
    assert set(tokens.tolist()) == {0, 1, 2}
    np.testing.assert_allclose(logprobs, np.log(1 / 3), rtol=1e-6)


def test_temperature_0_takes_the_first_largest_and_reports_the_models_own_logprob() -> None:
    logits = torch.tensor([[0.0, 3.0, 3.0, 1.0]])
    tokens, logprobs = draw(logits, np.array([0.99]), parameters(1, temperature=0.0, top_k=1, top_p=0.5))
    assert tokens.tolist() == [1]
    assert logprobs[0] == pytest.approx(float(logits.log_softmax(-1)[0, 1]))


def test_the_extremes_of_the_noise_draw_tokens_that_have_mass() -> None:
    logits = torch.tensor([[-torch.inf, 0.0, -torch.inf, 0.0, -torch.inf]]).repeat(2, 1)
    tokens, _ = draw(logits, np.array([2.0**-53, 1 - 2.0**-53]), parameters(2))
    assert tokens.tolist() == [1, 3]


def test_a_rows_token_does_not_depend_on_the_parameters_of_its_neighbours() -> None:
    logits = torch.randn(6, 40, generator=torch.Generator().manual_seed(0))
    noise = uniforms(stream_keys(3, np.arange(6), 0), 0)
    mixed = RowSampling(
        np.array([1.0, 0.0, 0.5, 1.0, 2.0, 1.0]), np.array([1.0, 1.0, 0.7, 0.9, 1.0, 1.0]), np.array([0, 0, 0, 3, 5, 0])
    )
    tokens, logprobs = draw(logits, noise, mixed)
    for i in range(6):
        one = RowSampling(mixed.temperature[i : i + 1], mixed.top_p[i : i + 1], mixed.top_k[i : i + 1])
        token, logprob = draw(logits[i : i + 1], noise[i : i + 1], one)
        assert (token[0], logprob[0]) == (tokens[i], pytest.approx(logprobs[i], abs=1e-6))
