"""Prefills sequences in waves, so that a prefix that several of them share is computed once.

    sequences that join ─▶ match: what is known of each (``prefix_cache.py``)
                            │
                            ├─ now: computed behind the known prefix ─▶ rows of the decoder's cache ─▶ prompts are kept
                            └─ later: those that share more with one of these ─▶ match again, and so on

    system prompt s, questions a b c, none known:     wave 1: s a      wave 2: (s) b, (s) c

Invariants
- Each sequence gets one row, and each wave computes at least one. Two sequences of a wave both compute a shared prefix
  only if it is too short to be worth a further wave.
- ``prefilled_tokens`` counts the tokens that decoders have really computed.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from actors.rollout.engines.prefix_index import Chain, common_tokens
from actors.rollout.engines.torch.decoder import Decoder
from actors.rollout.engines.torch.prefix_cache import LEAST_TOKENS, KnownPrefixes, PrefixCache

WAVE_TOKENS: Final = 64
"""Number of tokens that a further wave must save, since it goes through all layers once more."""


class SharedPrefill:
    """Prefills sequences for one decoder, and keeps the prefixes of their prompts within ``max_bytes``."""

    def __init__(self, max_bytes: int) -> None:
        self._cache = PrefixCache(max_bytes)
        self.prefilled_tokens = 0
        """Number of tokens computed so far."""

    def run(
        self,
        decoder: Decoder,
        sequences: Sequence[NDArray[np.int32]],
        prompt_tokens: Sequence[int],
        adapters: NDArray[np.int64] | None = None,
    ) -> tuple[Tensor, NDArray[np.int64]]:
        """Append a row for each of n ``sequences``, of which those of one adapter are all different.

        Args:
            prompt_tokens: number of leading tokens of each sequence that are worth keeping: its prompt.
            adapters: numbers of the sequences' adapters, int64[n]; None: they have none.

        Returns:
            Logits [n, vocab] in the order of the rows, and each sequence's row behind the present ones.
        """
        adapters = np.zeros(len(sequences), np.int64) if adapters is None else adapters
        before, logits, order = decoder.prefilled_tokens, list[Tensor](), list[int]()
        keeps = self._cache.on and decoder.shares_prefixes
        left = dict.fromkeys(range(len(sequences)), -1)
        while left:
            now, chains, left = self._wave(sequences, prompt_tokens, adapters, left) if keeps else (list(left), [], {})
            wave, row = [sequences[i] for i in now], decoder.rows
            logits.append(
                decoder.prefill(
                    wave,
                    KnownPrefixes(self._cache, chains) if any(chain.tokens for chain in chains) else None,
                    adapters[now],
                )
            )
            order += now
            for number, i in enumerate(now if keeps else (), row):
                self._cache.keep(sequences[i][: prompt_tokens[i]], decoder.parts(number), int(adapters[i]))
        self.prefilled_tokens += decoder.prefilled_tokens - before
        places = np.empty(len(order), np.int64)
        places[order] = np.arange(len(order))
        return logits[0] if len(logits) == 1 else torch.cat(logits), places

    def _wave(
        self,
        sequences: Sequence[NDArray[np.int32]],
        prompt_tokens: Sequence[int],
        adapters: NDArray[np.int64],
        left: dict[int, int],
    ) -> tuple[list[int], list[Chain], dict[int, int]]:
        """Choose a wave: sequences to compute now, their known prefixes, and those ``left`` for later.

        ``left``: sequence → number of its tokens that were known when it was put off. A sequence that gained nothing by
        waiting, as with a cache that is too small, does not wait again.
        """
        chains = {i: self._cache.match(sequences[i], int(adapters[i])) for i in left}
        now = [i for i, before in left.items() if chains[i].tokens <= before]
        rest, later = left.keys() - now, list[int]()
        for adapter in np.unique(adapters[list(rest)]):
            alike = sorted(
                rest & set(np.flatnonzero(adapters == adapter).tolist()), key=lambda i: sequences[i].tobytes()
            )
            for first, others in _alike(sequences, prompt_tokens, chains, alike):  # shared prefixes are neighbours
                now.append(first)
                (later if sum(others.values()) >= WAVE_TOKENS else now).extend(others)
        return now, [chains[i] for i in now], {i: chains[i].tokens for i in later}

    def forget(self) -> None:
        """Forget all prefixes, since the weights have changed."""
        self._cache.forget()

    def release(self) -> None:
        """Forget all prefixes, and free their memory."""
        self._cache.release()


def _alike(
    sequences: Sequence[NDArray[np.int32]], prompt_tokens: Sequence[int], chains: dict[int, Chain], ordered: list[int]
) -> Iterator[tuple[int, dict[int, int]]]:
    """Groups of neighbours in ``ordered`` that share more than their known prefix.

    Yields the first of each group, and for each other one the number of tokens saved if it is computed later.
    """
    at = 0
    while at < len(ordered):
        first, others = ordered[at], dict[int, int]()
        prompt, known = sequences[first][: prompt_tokens[first]], chains[first].tokens
        for other in ordered[at + 1 :]:
            spared = common_tokens(prompt, sequences[other][:-1]) - known
            if spared < LEAST_TOKENS:
                break
            others[other] = spared
        yield first, others
        at += 1 + len(others)
