"""Beginnings that prompts have in common are computed once, and what follows is what it would be without that."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from actors.rollout.engines.prefix_index import Chain
from actors.rollout.engines.torch.decoder import make_decoder
from actors.rollout.engines.torch.model_loading import load_model
from actors.rollout.engines.torch.prefill import behind_chunks
from actors.rollout.engines.torch.prefix_cache import BLOCK_TOKENS, PrefixCache
from actors.rollout.engines.torch.shared_prefill import SharedPrefill
from actors.scheduler.meter import distinct_tokens
from tests.tiny_checkpoint import make_tiny_checkpoint

FUSED = ["qwen3", "qwen2", "llama", "mistral"]
GENERIC = ["qwen3", "gpt2", "gpt_neox", "opt"]
CPU = [(name, "fused", "cpu") for name in FUSED] + [(name, "generic", "cpu") for name in GENERIC]
CUDA = [(name, kind, "cuda") for name, kind in (("qwen3", "fused"), ("llama", "fused"), ("gpt2", "generic"))]
CASES = [*CPU, *(pytest.param(*case, marks=pytest.mark.gpu) for case in CUDA)]
MIB = 1 << 20


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


def load(tmp_path: Path, architecture: str = "qwen3", device: str = "cpu", **options: Any) -> Any:
    path = make_tiny_checkpoint(tmp_path / architecture, architecture=architecture, **options)
    return load_model(path, "float32", torch.device(device))


def tokens(count: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(3, 99, count).astype(np.int32)


def behind(system: np.ndarray, *lengths: int) -> list[np.ndarray]:
    """Prompts that begin with ``system``, each with a question of its own."""
    return [np.concatenate([system, tokens(length, 100 + length)]) for length in lengths]


class Rows:
    """Drives a decoder behind a prefix cache as the engine does."""

    def __init__(self, model: Any, kind: str = "fused", *, cache_bytes: int = MIB, prefill_tokens: int = 200) -> None:
        self.decoder = make_decoder(model, kind, max_rows=24, max_tokens=160, prefill_tokens=prefill_tokens)
        self.shared = SharedPrefill(cache_bytes)
        self.rows: list[np.ndarray] = []
        self.joined = 0

    @torch.inference_mode()
    def join(self, *sequences: np.ndarray, said: int = 0) -> list[torch.Tensor]:
        """Logits of ``sequences``, whose last ``said`` tokens are no prompt's, in their order."""
        logits, places = self.shared.run(self.decoder, sequences, [len(sequence) - said for sequence in sequences])
        self.rows += [sequences[i] for i in np.argsort(places)]
        self.joined += sum(map(len, sequences))
        return [logits[place].clone() for place in places.tolist()]

    @torch.inference_mode()
    def grow(self, *, apart: bool = True) -> list[torch.Tensor]:
        """``apart``: with tokens that differ by row too."""
        self.rows = [np.append(row, np.int32(3 + (7 * len(row) + apart * i) % 90)) for i, row in enumerate(self.rows)]
        newest = np.array([row[-1] for row in self.rows], np.int64)
        return list(self.decoder.decode(newest, np.array([len(row) for row in self.rows])).clone())

    @property
    def spared(self) -> int:
        return self.joined - self.shared.prefilled_tokens


@torch.inference_mode()
def alone(model: Any, row: np.ndarray) -> torch.Tensor:
    return model(torch.from_numpy(row.astype(np.int64)).to(model.device)[None]).logits[0, -1]


@pytest.mark.parametrize(("architecture", "kind", "device"), CASES)
def test_logits_behind_a_common_beginning_are_those_of_hugging_face(
    tmp_path: Path, architecture: str, kind: str, device: str
) -> None:
    """Some join together, some later, and those that are there have been decoded in between."""
    model = load(tmp_path, architecture, device)
    batch, system = Rows(model, kind), tokens(50, 0)

    def check(rows: Sequence[np.ndarray], logits: Sequence[torch.Tensor]) -> None:
        for row, got in zip(rows, logits, strict=True):
            torch.testing.assert_close(got, alone(model, row), atol=1e-4, rtol=0)

    first = behind(system, 5, 30, 17, 1)
    check(first, batch.join(*first))
    assert batch.spared >= 3 * 32, "fewer than 50 where rows of one batch compute equally many tokens"
    for _ in range(3):
        logits = batch.grow()
        check(batch.rows, logits)
    before = batch.spared
    later = [*behind(system, 12, 33, 2), first[1], *behind(first[1][:66], 9), tokens(45, 7)]
    check(later, batch.join(*later))
    assert batch.spared - before >= 3 * 32 + 64 + 48
    for _ in range(12):
        logits = batch.grow()
        check(batch.rows, logits)


def test_logits_behind_a_known_beginning_are_the_same_bits_as_without(tmp_path: Path) -> None:
    """Held by the fused decoder in float32 on the CPU with one thread, whatever the cache holds and whoever joins."""
    model = load(tmp_path, hidden=96, layers=3)
    system = tokens(71, 0)
    prompts = [*behind(system, 5, 30, 17, 1, 40), *behind(system[:33], 8, 31), tokens(20, 5)]

    def history(batch: Rows, together: int) -> dict[bytes, list[torch.Tensor]]:
        seen: dict[bytes, list[torch.Tensor]] = {}
        for start in range(0, len(prompts), together):
            joining = prompts[start : start + together]
            seen |= {prompt.tobytes(): [got] for prompt, got in zip(joining, batch.join(*joining), strict=True)}
        names = [row.tobytes() for row in batch.rows]
        for _ in range(20):
            for name, got in zip(names, batch.grow(apart=False), strict=True):
                seen[name].append(got)
        return seen

    without = Rows(model, cache_bytes=0)
    expected = history(without, 1)
    assert without.spared == 0
    for together in (8, 3, 1):
        batch = Rows(model, prefill_tokens=64 * together)
        for name, seen in history(batch, together).items():
            assert all(torch.equal(ours, theirs) for ours, theirs in zip(seen, expected[name], strict=True))
        assert batch.spared >= 4 * 70 + 33, "the first 71 and the first 33 tokens, but for the last one"


@pytest.mark.parametrize("kind", ["fused", "generic"])
def test_of_prompts_that_join_together_what_is_common_is_computed_once(tmp_path: Path, kind: str) -> None:
    """A system prompt, two sets of examples behind it, four questions behind each; none of them in whole blocks."""
    system = tokens(61, 0)
    examples = [np.concatenate([system, tokens(37, seed)]) for seed in (1, 2)]
    prompts = [np.concatenate([first, tokens(9, 10 * i + j)]) for i, first in enumerate(examples) for j in range(4)]
    assert distinct_tokens(prompts) == 61 + 2 * 37 + 8 * 9
    batch = Rows(load(tmp_path), kind)
    batch.join(*prompts)
    computed_again = batch.shared.prefilled_tokens - distinct_tokens(prompts)
    assert computed_again == 0 if kind == "fused" else computed_again <= 8 * 16
    batch.join(*[np.append(prompt, np.int32(1)) for prompt in prompts])
    assert batch.shared.prefilled_tokens == 61 + 2 * 37 + 8 * 9 + computed_again + 8, "but for their last tokens"


def test_what_a_wave_would_not_save_is_computed_together(tmp_path: Path) -> None:
    batch = Rows(load(tmp_path))
    batch.join(*behind(tokens(32, 0), 9, 10))
    assert batch.spared == 0, "32 tokens once are less than a pass through all layers is worth"
    batch.join(*behind(tokens(32, 0), 11, 12))
    assert batch.spared == 2 * 32, "now it costs nothing"


def test_what_a_sample_has_said_is_computed_behind_its_prompt_and_not_kept(tmp_path: Path) -> None:
    batch, prompt, answer = Rows(load(tmp_path)), tokens(40, 0), tokens(50, 1)
    moved = np.concatenate([prompt, answer])
    batch.join(moved, said=50)
    batch.join(np.append(moved, np.int32(5)), said=51)
    assert batch.spared == 40, "the prompt"


def test_a_cache_that_is_too_small_costs_no_wave_a_prompt(tmp_path: Path) -> None:
    model, two_blocks = load(tmp_path), 2 * BLOCK_TOKENS * 2 * 2 * 2 * 8 * 4
    batch = Rows(model, cache_bytes=two_blocks)
    calls, prefill = list[int](), batch.decoder.prefill
    batch.decoder.prefill = lambda sequences, *more: (calls.append(len(sequences)), prefill(sequences, *more))[1]  # type: ignore[method-assign]
    prompts = behind(tokens(80, 0), 3, 4, 5, 6, 7, 8)
    for prompt, got in zip(prompts, batch.join(*prompts), strict=True):
        torch.testing.assert_close(got, alone(model, prompt), atol=1e-4, rtol=0)
    assert 0 < sum(part.nbytes for part in batch.shared._cache._pool) <= two_blocks
    assert calls == [1, 1, 4]


def test_after_a_change_of_weights_nothing_older_is_used(tmp_path: Path) -> None:
    model = load(tmp_path)
    batch, prompts = Rows(model), behind(tokens(60, 0), 5, 9)
    batch.join(*prompts)
    batch.shared.forget()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.3)
    batch.decoder.weights_changed()
    spared = batch.spared
    (got,) = batch.join(prompts[0])
    assert batch.spared == spared
    torch.testing.assert_close(got, alone(model, prompts[0]), atol=1e-4, rtol=0)


def test_batches_behind_a_long_beginning_hold_fewer_rows_for_what_they_look_at() -> None:
    assert [len(chunk) for chunk in behind_chunks([10] * 8, [20] * 8, 80)] == [8]
    assert [len(chunk) for chunk in behind_chunks([10] * 8, [320] * 8, 80)] == [2] * 4


def test_a_batch_computes_again_no_more_than_its_spread_however_much_is_known() -> None:
    """Two tokens behind 800 count as many as a hundred behind none, and are not computed with them."""
    assert behind_chunks([2, 100, 3, 90], [802, 110, 803, 100], 10_000, spread=16) == [[0, 2], [3, 1]]


def test_what_is_known_of_many_rows_is_read_a_few_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is read is a copy: it is not to hold more tokens than a batch of prefill."""
    read, sizes = PrefixCache.read, list[int]()

    def seen(cache: PrefixCache, chains: Sequence[Chain]) -> list[torch.Tensor]:
        sizes.append(len(chains) * max(chain.tokens for chain in chains))
        return read(cache, chains)

    model = load(tmp_path)
    batch, prompts = Rows(model, prefill_tokens=200), behind(tokens(90, 0), *range(1, 9))
    batch.join(prompts[0])
    monkeypatch.setattr(PrefixCache, "read", seen)
    for prompt, got in zip(prompts[1:], batch.join(*prompts[1:]), strict=True):
        torch.testing.assert_close(got, alone(model, prompt), atol=1e-4, rtol=0)
    assert len(sizes) > 1 and max(sizes) <= 200
