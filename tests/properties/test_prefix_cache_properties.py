"""Whatever is kept, forgotten and pushed out: what is read is of exactly these tokens, adapter and weights of now."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from itertools import cycle

import numpy as np
import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from torch import Tensor

from actors.rollout.engines import prefix_index
from actors.rollout.engines.torch.prefix_cache import BLOCK_TOKENS, LEAST_TOKENS, PrefixCache

BLOCK_BYTES = BLOCK_TOKENS * (2 * 3 + 1) * 4
"""Size of the two parts below, together."""

blocks = st.lists(st.integers(0, 1), max_size=5)
"""A prompt by blocks, each of which is one of two: so many begin alike."""
prompts = st.tuples(blocks, st.integers(0, BLOCK_TOKENS)).filter(any)
"""And how many tokens, of those that all prompts go on with, follow the last of these blocks."""
steps = st.lists(st.one_of(prompts, st.sampled_from(["new weights", "sleep"])), min_size=1, max_size=25)


def tokens_of(prompt: tuple[list[int], int]) -> NDArray[np.int32]:
    """All blocks of a kind are the same tokens, wherever they stand."""
    whole = [kind * 100 + i for kind in prompt[0] for i in range(BLOCK_TOKENS)]
    return np.array([*whole, *range(900, 900 + prompt[1])], np.int32)


def computed(tokens: NDArray[np.int32], version: int, stop: int) -> list[Tensor]:
    """What a decoder computes: for each token something that nothing but it, what it follows and the weights give."""
    seen = [zlib.crc32(tokens[: at + 1].tobytes(), version) % 100_000 for at in range(stop)]
    column = torch.tensor(seen, dtype=torch.float32).reshape(-1, 1)
    return [torch.stack([column.expand(-1, 3), -column.expand(-1, 3)]), column]  # [2, tokens, 3] and [tokens, 1]


def check(
    cache: PrefixCache, todo: list[tuple[list[int], int] | str], places: int, adapters: tuple[int, ...] = (0,)
) -> None:
    """``adapters``: the numbers of those that prompts are of in turn."""
    version = 0
    for step, adapter in zip(todo, cycle(adapters), strict=False):
        if isinstance(step, str):
            version += step == "new weights"
            (cache.forget if step == "new weights" else cache.release)()
            continue
        tokens = tokens_of(step)
        if (chain := cache.match(tokens, adapter)).tokens:
            assert LEAST_TOKENS <= chain.tokens < len(tokens), "the last token is left to compute"
            known = [part[0] for part in cache.read([chain])]
            for part, want in zip(known, computed(tokens, 10 * version + adapter, chain.tokens), strict=True):
                assert torch.equal(part, want)
        cache.keep(tokens, computed(tokens, 10 * version + adapter, len(tokens)), adapter)
        assert sum(part.nbytes for part in cache._pool) <= places * BLOCK_BYTES
        again = cache.match(np.append(tokens, np.int32(999)), adapter).tokens
        most = min(len(tokens), places * BLOCK_TOKENS)
        assert again == (most if most >= LEAST_TOKENS else 0), "the newest is there, if it fits"


@settings(max_examples=150, deadline=None)
@given(todo=steps, places=st.integers(0, 12), adapters=st.sampled_from([(0,), (0, 1, 1, 2)]))
def test_what_is_read_is_of_the_same_tokens_and_of_the_weights_of_now(
    todo: list[tuple[list[int], int] | str], places: int, adapters: tuple[int, ...]
) -> None:
    check(PrefixCache(places * BLOCK_BYTES + BLOCK_BYTES // 2), todo, places, adapters)


@settings(max_examples=100, deadline=None)
@given(first=prompts, others=st.lists(prompts, min_size=1, max_size=4), places=st.integers(1, 20))
def test_chains_of_many_lengths_are_kept_and_read_together(
    first: tuple[list[int], int], others: list[tuple[list[int], int]], places: int
) -> None:
    cache, sequences = PrefixCache(places * BLOCK_BYTES), [tokens_of(prompt) for prompt in [first, *others]]
    for tokens in sequences:
        cache.keep(tokens, computed(tokens, 0, len(tokens)))
    known = [(tokens, chain) for tokens in sequences if (chain := cache.match(tokens)).tokens]
    if not known:
        return
    parts = cache.read([chain for _, chain in known])
    for row, (tokens, chain) in enumerate(known):
        for part, want in zip(parts, computed(tokens, 0, chain.tokens), strict=True):
            assert torch.equal(part[row][..., : chain.tokens, :], want)
            assert part.isfinite().all()


def remembers_too_long(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keys and values of older weights stay."""
    monkeypatch.setattr(PrefixCache, "forget", lambda self: None)


def blind_to_what_is_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """A block is found by its own tokens, wherever it stood."""

    class AnyParent(dict[tuple[int, bytes], int]):
        def get(self, key: tuple[int, bytes], default: object = None) -> object:  # type: ignore[override]
            return next((place for node, place in self.items() if node[1] == key[1]), default)

    start = prefix_index.PrefixIndex.__init__

    def blind(self: prefix_index.PrefixIndex, block_tokens: int, blocks_max: int) -> None:
        start(self, block_tokens, blocks_max)
        self._places = AnyParent()

    monkeypatch.setattr(prefix_index.PrefixIndex, "__init__", blind)


def pushes_out_the_beginning(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first block of a chain is pushed out before those that follow it, and its place is another one's."""

    def use(self: prefix_index.PrefixIndex, chain: list[int]) -> None:
        for place in chain:
            self._nodes.move_to_end(place)

    monkeypatch.setattr(prefix_index.PrefixIndex, "_use", use)


def blind_to_adapters(monkeypatch: pytest.MonkeyPatch) -> None:
    """What one adapter has computed is found by another."""

    def match(self: prefix_index.PrefixIndex, tokens: NDArray[np.int32], adapter: int) -> prefix_index.Chain:
        return found(self, tokens, 0)

    found = prefix_index.PrefixIndex.match
    monkeypatch.setattr(prefix_index.PrefixIndex, "match", match)


@pytest.mark.parametrize(
    "fault", [remembers_too_long, blind_to_what_is_before, pushes_out_the_beginning, blind_to_adapters]
)
def test_the_property_sees_a_cache_that_breaks_it(
    fault: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    fault(monkeypatch)
    adapters = (0, 1) if fault is blind_to_adapters else (0,)

    @settings(max_examples=2000, deadline=None, database=None, phases=[Phase.generate], report_multiple_bugs=False)
    @given(todo=steps, places=st.integers(1, 6))
    def broken(todo: list[tuple[list[int], int] | str], places: int) -> None:
        check(PrefixCache(places * BLOCK_BYTES), todo, places, adapters)

    with pytest.raises((AssertionError, RuntimeError)):
        broken()
