"""The running sequences of the torch engine, in columns: one slot a sequence, live slots first.

Invariants
- Live sequences are exactly in slots 0 … ``count`` - 1; a freed slot is filled by one from the end.
- ``tokens[i, : lengths[i]]`` is prompt plus response so far; ``offsets[i]`` is the position of the next token.
- Columns grow by doubling up to ``max_rows`` and ``max_tokens`` and never beyond.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from actors.protocol.tokens import FinishReason
from actors.rollout.engine import GenerationRequest
from actors.rollout.engines.torch.token_sampler import RowSampling
from actors.rollout.sampling import stream_keys


class RunningRows:
    """Holds the running sequences in columns."""

    def __init__(self, max_rows: int, max_tokens: int) -> None:
        self._max_tokens = max_tokens
        self.count = 0
        self.requests = np.zeros(max_rows, np.int64)
        self.lengths = np.zeros(max_rows, np.int64)
        self.offsets = np.zeros(max_rows, np.int64)
        self.budgets = np.zeros(max_rows, np.int64)
        """Offsets at which the sequences end at the latest."""
        self.prompts = np.zeros(max_rows, np.int64)
        """Numbers of leading tokens that the prefix cache keeps: other sequences, or a later turn, may share them."""
        self.branches = np.zeros(max_rows, np.int64)
        """Rows of the decoder's cache; meaningless for sequences that are not prefilled yet."""
        self.adapters = np.zeros(max_rows, np.int64)
        """Numbers of the sequences' adapters; 0: none."""
        self.tops = np.zeros(max_rows, np.int64)
        """Numbers of likeliest tokens that are told at each position."""
        self.keys = np.zeros(max_rows, np.uint64)
        self.temperature = np.ones(max_rows)
        self.top_p = np.ones(max_rows)
        self.top_k = np.zeros(max_rows, np.int64)
        self.stops = np.full((max_rows, 1), -1, np.int64)
        self.tokens = np.zeros((max_rows, min(64, max_tokens)), np.int32)

    def extend(self, requests: Sequence[GenerationRequest]) -> None:
        """Put ``requests`` into the next free slots."""
        if not requests:
            return
        samplings = [request.sampling for request in requests]
        known = np.array([len(request.generated) for request in requests], np.int64)
        prompts = np.array([len(request.prompt_ids) for request in requests], np.int64)
        self._widen(int((prompts + known).max()) + 1, max(len(sampling.stop_token_ids) for sampling in samplings))
        new = slice(self.count, self.count + len(requests))
        self.requests[new] = [request.request for request in requests]
        firsts = np.array([request.first for request in requests], np.int64)
        turns = np.array([request.limit > 0 for request in requests])
        self.lengths[new], self.offsets[new] = prompts + known, firsts + known
        self.budgets[new] = np.minimum([request.end for request in requests], firsts + self._max_tokens - prompts)
        self.prompts[new] = prompts + known * turns
        self.adapters[new] = [request.adapter for request in requests]
        self.tops[new] = [request.top_logprobs for request in requests]
        self.keys[new] = _keys(requests)
        self.temperature[new] = [sampling.temperature for sampling in samplings]
        self.top_p[new] = [sampling.top_p for sampling in samplings]
        self.top_k[new] = [sampling.top_k for sampling in samplings]
        self.stops[new] = -1
        for slot, request in enumerate(requests, self.count):
            prompt = len(request.prompt_ids)
            self.tokens[slot, :prompt] = request.prompt_ids
            if len(request.generated):
                self.tokens[slot, prompt : prompt + len(request.generated)] = request.generated
            self.stops[slot, : len(request.sampling.stop_token_ids)] = request.sampling.stop_token_ids
        self.count += len(requests)

    def _widen(self, length: int, stops: int) -> None:
        if length > self.tokens.shape[1]:
            width = min(max(length, 2 * self.tokens.shape[1]), self._max_tokens)
            self.tokens = np.pad(self.tokens, ((0, 0), (0, width - self.tokens.shape[1])))
        if stops > self.stops.shape[1]:
            self.stops = np.pad(self.stops, ((0, 0), (0, stops - self.stops.shape[1])), constant_values=-1)

    def sequence(self, slot: int) -> NDArray[np.int32]:
        """Prompt and response so far of one slot."""
        return self.tokens[slot, : self.lengths[slot]]

    def sampling(self) -> RowSampling:
        """The live rows' sampling parameters."""
        n = self.count
        return RowSampling(self.temperature[:n], self.top_p[:n], self.top_k[:n])

    def last_tokens(self) -> NDArray[np.int64]:
        """The newest token of each live row, whose keys and values are not computed yet."""
        n = self.count
        return self.tokens[np.arange(n), self.lengths[:n] - 1].astype(np.int64)

    def record(self, tokens: NDArray[np.int64]) -> NDArray[np.uint8]:
        """Append one token to each live row; returns FinishReason codes uint8[count]."""
        n = self.count
        longest = int(self.lengths[:n].max()) + 1
        if longest > self.tokens.shape[1]:
            self._widen(longest, 0)
        self.tokens[np.arange(n), self.lengths[:n]] = tokens
        self.lengths[:n] += 1
        self.offsets[:n] += 1
        finished = np.where(self.offsets[:n] >= self.budgets[:n], np.uint8(FinishReason.LENGTH), np.uint8(0))
        finished[(self.stops[:n] == tokens[:, None]).any(1)] = FinishReason.STOP
        return finished

    def remove(self, slots: Sequence[int] | NDArray[np.int64]) -> None:
        """Free ``slots``; live ones from the end move into them."""
        gone = np.zeros(self.count, bool)
        gone[np.asarray(slots, np.int64)] = True
        keep = self.count - int(gone.sum())
        targets = np.flatnonzero(gone[:keep])
        sources = keep + np.flatnonzero(~gone[keep:])
        if len(sources):
            for column in self._columns():
                column[targets] = column[sources]
        self.count = keep

    def _columns(self) -> list[NDArray[np.generic]]:
        shared = [self.requests, self.lengths, self.offsets, self.budgets, self.prompts, self.branches, self.keys]
        return [*shared, self.adapters, self.tops, self.temperature, self.top_p, self.top_k, self.stops, self.tokens]


def _keys(requests: Sequence[GenerationRequest]) -> NDArray[np.uint64]:
    """Noise streams of ``requests``; those with the same seed are computed together."""
    seeds = np.array([request.sampling.seed & 0xFFFFFFFFFFFFFFFF for request in requests], np.uint64)
    prompts = np.array([request.prompt for request in requests], np.int64)
    siblings = np.array([request.sibling for request in requests], np.int64)
    keys = np.zeros(len(requests), np.uint64)
    for seed in np.unique(seeds):
        rows = seeds == seed
        keys[rows] = stream_keys(int(seed), prompts[rows], siblings[rows])
    return keys
