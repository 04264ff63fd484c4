"""What samples take at least: engines' seconds by length, and what engines can do of it with little in flight.

    decode steps ≥ tokens / places, ≥ context tokens / KV cache ─▶ Sharing ─▶ TokenCosts ─▶ Demand, one for each step

A decode step costs something whatever is in it. A sharing says which part of that a token pays, so that no decode step
gets more than it costs; a token's own time comes on top. What is paid in a second by engines that are full is a second
each; with less in flight it is less.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from actors.policies.assigning.generation_time import Instance
from benchmarks.papers.cluster.costs import DecodePace


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind describes engines that there may be."""

    instance: Instance
    size: float = 1.0
    """Size of one, in units of ``Supply``: engines, or devices where they may make engines of several kinds."""


@dataclass(frozen=True, slots=True)
class Sharing:
    """Says how samples share a decode step of one kind of engine: ``step_s`` at least, and their own time."""

    instance: Instance
    prompt_tokens: int
    step_s: float
    """Seconds of a decode step, whatever is in it."""
    of_place: float
    """Part of it that each sample in it pays: no more than 1 / places."""
    of_context: float
    """Part that each token of context pays: no more than 1 / KV cache. One of the two parts is 0."""
    sequence_s: float
    """Seconds of a sample's own."""
    context_token_s: float
    """Seconds that each token of its context adds."""

    def token_s(self, contexts: np.ndarray) -> np.ndarray:
        """What a token pays, by its sample's context."""
        return self._own_s(contexts) + self.step_s * (self.of_place + self.of_context * contexts)

    def most_tokens_s(self, engines: float, samples: float) -> float:
        """Tokens a second, if no context is longer than the prompt."""
        if engines <= 0:
            return 0.0
        batch = min(samples / engines, self.instance.places)
        return engines * batch / (self.step_s + batch * float(self._own_s(self.prompt_tokens)))

    def paid_s(
        self, engines: float | np.ndarray, samples: float | np.ndarray, context_tokens: float | np.ndarray
    ) -> np.ndarray:
        """What is paid in a second at most, with so many samples and tokens in flight: ``engines`` seconds or less.

        With b samples, c tokens of context, and the part φ = of_place · b + of_context · c that is paid for, an engine
        leaves (1 - φ) F / (F + own) of its time unpaid. Over M engines that is F · Σ a / D with a = 1 - φ, which is at
        least F (Σ a)² / Σ a D; and Σ φ · own is least where all have the same b and c, and contexts are prompts.
        """
        there = np.maximum(engines, 1e-9)
        prompt, kappa = self.prompt_tokens, self.context_token_s
        b = np.minimum(samples / there, self.instance.places)
        c = np.maximum(context_tokens / there, prompt * b)
        left = np.maximum(0.0, 1 - self.of_place * b - self.of_context * c)
        if self.of_context and prompt:  # beyond that, what the prompts take away is more than samples bring
            b = np.minimum(b, 1 / (2 * self.of_context * prompt))
        own_paid_s = self.of_place * self._own_s(prompt) * b**2
        own_paid_s += self.of_context * (kappa * c**2 + self.sequence_s * prompt * b**2)
        below_s = self.step_s * left + self.sequence_s * b + kappa * c - own_paid_s
        unpaid = np.divide(self.step_s * left**2, below_s, out=np.zeros_like(below_s), where=(left > 0) & (below_s > 0))
        return np.asarray(engines * (1 - unpaid))

    def _own_s(self, context_tokens: float | np.ndarray) -> np.ndarray:
        return np.asarray(self.sequence_s + self.context_token_s * context_tokens)


@dataclass(frozen=True, slots=True)
class TokenCosts:
    """Holds what a sample takes at least, by its length from 0 on, for one job: its samples share decode steps."""

    work_s: np.ndarray
    """Seconds of engines or devices, as ``Supply`` counts, with the prefill, float64[longest + 1]."""
    alone_s: np.ndarray
    """Seconds without company, float64[longest + 1]."""
    sharing: Sharing | None
    """How decode steps are shared, where all engines are of one kind, whose size is 1."""


@dataclass(frozen=True, slots=True)
class Flight:
    """Describes a step's samples, as far as engines run empty without them."""

    sharing: Sharing
    group: int
    """Samples of a group."""
    context_tokens: np.ndarray
    """Tokens of a group whose samples are complete, prompts included, float64[groups]."""


@dataclass(frozen=True, slots=True)
class Demand:
    """A demand is one step's work by group, which is what the trainer takes as a whole."""

    work_s: np.ndarray
    """Seconds of engines or devices together, as ``Supply`` counts, float64[groups]."""
    alone_s: np.ndarray
    """Seconds of the longest sample, decoded without company, float64[groups]."""
    train_s: np.ndarray
    """Seconds of training on all devices that train, float64[groups]."""
    early: float = 0.0
    """Part of the training that a sample's end alone allows; the rest waits for its group."""
    each: Demand | None = None
    """Demand by sample; needed where ``early`` is not 0."""
    flight: Flight | None = None
    """Samples in flight; None where engines are not of one kind."""


def token_costs(kinds: Sequence[Kind], prompt_tokens: int, lengths: np.ndarray) -> TokenCosts:
    """What each length takes, for a job with int[n] ``lengths``: each token by the kind of engine that is best for it.

    Which share of what a decode step costs is counted has to be the same for all samples that may be in one step, so it
    is chosen here, as the one that comes to most, and not for each step of the job.
    """
    tokens = np.asarray(lengths, np.int64)
    contexts = prompt_tokens + np.arange(int(tokens.max())) + 0.5  # of a sample's first, second, … decode step
    making = len(tokens) - np.searchsorted(np.sort(tokens), np.arange(len(contexts)), side="right")  # that get so far
    chosen = [
        max(sharings(kind.instance, prompt_tokens), key=lambda one: float(one.token_s(contexts) @ making))
        for kind in kinds
    ]
    work_s = np.min([kind.size * one.token_s(contexts) for kind, one in zip(kinds, chosen, strict=True)], axis=0)
    alone_s = np.min([_alone_s(kind.instance, contexts) for kind in kinds], axis=0)
    prefills_s = [kind.instance.prefill_token_s * prompt_tokens for kind in kinds]
    prefill_work_s = min(kind.size * s for kind, s in zip(kinds, prefills_s, strict=True))
    return TokenCosts(
        summed(work_s) + prefill_work_s,
        summed(alone_s) + min(prefills_s),
        chosen[0] if len(kinds) == 1 and kinds[0].size == 1 else None,
    )


def demand(costs: TokenCosts, lengths: np.ndarray, train_s: np.ndarray, group: int, early: float = 0.0) -> Demand:
    """The demand of the samples of a step in order of their groups, ``group`` each."""
    sharing = costs.sharing
    return Demand(
        work_s=costs.work_s[lengths].reshape(-1, group).sum(axis=1),
        alone_s=costs.alone_s[lengths].reshape(-1, group).max(axis=1),
        train_s=np.asarray(train_s, np.float64).reshape(-1, group).sum(axis=1),
        early=early,
        each=demand(costs, lengths, train_s, 1) if early else None,
        flight=Flight(sharing, group, (sharing.prompt_tokens + lengths).reshape(-1, group).sum(axis=1).astype(float))
        if sharing
        else None,
    )


def summed(parts: np.ndarray) -> np.ndarray:
    """Sums of the first 0, 1, … of n parts, float64[n + 1]."""
    return np.concatenate([[0.0], np.cumsum(parts)])


def sharings(instance: Instance, prompt_tokens: int) -> list[Sharing]:
    """All ways to share: by places or by cache; with reading the weights, or with products in its place."""
    pace = instance.pace
    assert isinstance(pace, DecodePace)
    return [
        Sharing(instance, prompt_tokens, step_s, of_place, of_context, pace.sequence_s + own_s, pace.context_token_s)
        for of_place, of_context in ((1 / instance.places, 0.0), (0.0, 1 / instance.kv_tokens))
        for step_s, own_s in ((pace.fixed_s + pace.weights_s, 0.0), (pace.fixed_s, pace.compute_s))
    ]


def _alone_s(instance: Instance, contexts: np.ndarray) -> np.ndarray:
    pace = instance.pace
    assert isinstance(pace, DecodePace)
    own_s = pace.sequence_s + pace.context_token_s * contexts
    return own_s + pace.fixed_s + max(pace.weights_s, pace.compute_s)
