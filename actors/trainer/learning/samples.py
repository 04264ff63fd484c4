"""Granted groups become samples, and samples micro-batches.

    GroupGrant ─ group_samples ─▶ TrainSample* ─ portions, pad (or both: cut) ─▶ MicroBatch*

Always true
- Samples of advantage 0 are counted but not computed, unless something else gives them a gradient.
- Tokens of an environment, whose version is below 0, are part of the input; nothing is learned from them, and they
  count in no length and in no mean.
- Each token of the model is learned from in exactly one sequence: where an environment begins a fresh context, tokens
  repeated from earlier contexts count as the environment's.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from actors.protocol.episodes import FRESH
from actors.protocol.groups import GroupGrant
from actors.protocol.marks import contexts
from actors.protocol.training import MicroBatch
from actors.trainer.errors import BadGrant
from actors.trainer.learning.rules import LearningRule


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainSample:
    """Holds one response of r tokens with its advantage, ready to be learned from.

    An episode becomes one sample for each of its contexts.
    """

    prompt: int
    sibling: int
    context: int = 0
    """Number of the context in its episode."""
    prompt_ids: np.ndarray  # int32[p]
    tokens: np.ndarray  # int32[r]
    logprobs: np.ndarray  # float32[r]
    stale: np.ndarray  # bool[r]
    advantage: float | np.ndarray
    """Advantage of all tokens, or float32[r]. With rules that whiten it is the score at first (``step_estimates``)."""
    mask: np.ndarray | None = None
    """Tokens of the model, bool[r], the only ones that are learned from; None: all."""
    weight: float = 1.0
    """Weight of each such token in the loss."""
    reference_logprobs: np.ndarray | None = None  # float32[r]
    old_logprobs: np.ndarray | None = None
    """Log-probabilities float32[r] by the policy, under the weights before the step."""
    old_values: np.ndarray | None = None  # float32[r]
    returns: np.ndarray | None = None  # float32[r]
    routes: np.ndarray | None = None
    """Experts that predicted each token, uint8[r, bytes] (``actors/models/routers.py``), 0 where not known."""

    @property
    def name(self) -> tuple[int, int, int]:
        """Key that is unique within the step."""
        return self.prompt, self.sibling, self.context

    @property
    def length(self) -> int:
        return self.prompt_ids.size + self.tokens.size

    @property
    def model_tokens(self) -> int:
        """Tokens that are learned from."""
        return self.tokens.size if self.mask is None else int(np.count_nonzero(self.mask))


def group_samples(group: GroupGrant, rule: LearningRule, *, max_staleness: int) -> list[TrainSample]:
    """The samples of one granted group, in sibling order, with the contexts of each episode in their order.

    Raises:
        BadGrant: the columns do not fit together, or a token is of a version older than ``max_staleness`` allows.
    """
    check_group(group)
    mask = group.versions >= 0
    oldest = int(group.versions[mask].min(initial=group.step))
    if oldest < group.step - max_staleness:
        raise BadGrant(
            f"group of step {group.step}, prompt {group.prompt}: versions has {oldest}, expected {max_staleness} "
            f"fewer than the step at most (sync.max_staleness); the scheduler let a worker of that version generate it"
        )
    lengths = model_tokens(group)
    advantages = rule.advantages(group.rewards, lengths).tolist()
    ends = np.cumsum(group.lengths).tolist()
    stale = group.versions < group.step
    samples: list[TrainSample] = []
    start = 0
    rows = zip(group.siblings.tolist(), ends, advantages, lengths.tolist(), strict=True)
    for sibling, end, advantage, length in rows:
        sample = TrainSample(
            prompt=group.prompt,
            sibling=sibling,
            prompt_ids=group.prompt_ids,
            tokens=group.tokens[start:end],
            logprobs=group.logprobs[start:end],
            stale=stale[start:end],
            advantage=advantage,
            mask=None if length == end - start else mask[start:end],
            weight=rule.token_weight(length),
            routes=None if group.routes is None else group.routes[start:end],
        )
        samples += [sample] if group.prompt_ids.size else in_contexts(sample, group.versions[start:end])
        start = end
    return sorted(samples, key=lambda sample: (sample.sibling, sample.context))


def in_contexts(episode: TrainSample, marks: np.ndarray) -> list[TrainSample]:
    """A sample for each context of an episode that has tokens of the model, up to the last of these.

    The environment's tokens at its start are the prompt. The advantage, and the weight of a token, are the episode's.
    """
    found: list[TrainSample] = []
    for number, context in enumerate(contexts(marks)):
        said = marks[context.first : context.end] >= 0
        if not said.any():
            continue
        mask = said[: np.flatnonzero(said)[-1] + 1]
        response = slice(context.first, context.first + len(mask))
        found.append(
            dataclasses.replace(
                episode,
                context=number,
                prompt_ids=episode.tokens[context.start : context.first],
                tokens=episode.tokens[response],
                logprobs=episode.logprobs[response],
                stale=episode.stale[response] & mask,
                mask=None if mask.all() else mask,
                routes=None if episode.routes is None else episode.routes[response],
            )
        )
    return found


def model_tokens(group: GroupGrant) -> np.ndarray:
    """int64[g]: tokens of the model in each response."""
    ends = np.cumsum(group.lengths, dtype=np.int64)
    counted = np.concatenate([[0], np.cumsum(group.versions >= 0)])
    return counted[ends] - counted[ends - group.lengths]


def check_group(group: GroupGrant) -> None:
    """Raise BadGrant, naming the field, unless the ragged columns agree with each other."""
    where = f"group of step {group.step}, prompt {group.prompt}"
    siblings = group.siblings.size
    for field, size in (("lengths", group.lengths.size), ("rewards", group.rewards.size)):
        if size != siblings:
            raise BadGrant(f"{where}: {field} has {size} rows, expected {siblings}, one per sibling")
    total = int(group.lengths.sum())
    columns = (("tokens", group.tokens), ("logprobs", group.logprobs), ("versions", group.versions))
    for field, column in columns:
        if column.size != total:
            raise BadGrant(f"{where}: {field} has {column.size} entries, expected {total}, the sum of lengths")
    if (routes := group.routes) is not None and (routes.ndim != 2 or len(routes) != total):
        raise BadGrant(f"{where}: routes has the shape {routes.shape}, expected [{total}, bytes]")
    if siblings and (group.lengths.min() < 0 or len(set(group.siblings.tolist())) != siblings):
        raise BadGrant(f"{where}: lengths must not be negative and siblings must differ")
    begins = (np.cumsum(group.lengths) - group.lengths)[group.lengths > 0]
    if not group.prompt_ids.size and (group.versions[begins] != FRESH).any():
        raise BadGrant(f"{where}: prompt_ids is empty; the first response token needs something to be predicted from")


def cut(samples: Iterable[TrainSample], *, budget_tokens: int, keep_zero: bool) -> list[MicroBatch]:
    """The micro-batches of ``portions``, without samples that have no response, or advantage 0 unless ``keep_zero``."""
    useful = [s for s in samples if s.model_tokens and (keep_zero or np.any(s.advantage))]
    return [pad(part) for part in portions(useful, budget_tokens=budget_tokens)]


def portions(samples: Iterable[TrainSample], *, budget_tokens: int) -> list[list[TrainSample]]:
    """Sort by length and cut into parts of at most ``budget_tokens`` padded tokens (at least one sample each).

    Longest first, so that the largest allocation comes first. Where prompts make up most of the tokens, siblings stay
    together, so that a backend may compute their prompt once. Ties go by name: the result depends on the samples alone.
    """
    useful = list(samples)
    if 2 * sum(s.prompt_ids.size for s in useful) > sum(s.length for s in useful):
        longest: dict[int, int] = {}
        for s in useful:
            longest[s.prompt] = max(s.length, longest.get(s.prompt, 0))
        useful.sort(key=lambda s: (-longest[s.prompt], s.prompt, -s.length, s.sibling, s.context))
    else:
        useful.sort(key=lambda s: (-s.length, s.name))
    batches: list[list[TrainSample]] = []
    width = 0
    for sample in useful:
        width = max(width, sample.length)
        if not batches or (len(batches[-1]) + 1) * width > budget_tokens:
            batches.append([])
            width = sample.length
        batches[-1].append(sample)
    return batches


def pad(samples: Sequence[TrainSample]) -> MicroBatch:
    """One micro-batch of these samples, in this order, as wide as the longest.

    Each of the optional columns (old and reference log-probabilities, values, returns) is there if all samples have it.
    """
    lengths = np.array([s.length for s in samples], dtype=np.int32)
    prompt_lengths = np.array([s.prompt_ids.size for s in samples], dtype=np.int32)
    shape = (len(samples), int(lengths.max()))
    input_ids = np.zeros(shape, dtype=np.int32)
    behaviour, advantages, weight = (np.zeros(shape, dtype=np.float32) for _ in range(3))
    stale = np.zeros(shape, dtype=np.bool_)
    for row, sample in enumerate(samples):
        p, end = sample.prompt_ids.size, sample.length
        input_ids[row, :p] = sample.prompt_ids
        input_ids[row, p:end] = sample.tokens
        behaviour[row, p:end] = sample.logprobs
        advantages[row, p:end] = sample.advantage
        weight[row, p:end] = sample.weight if sample.mask is None else sample.weight * sample.mask
        stale[row, p:end] = sample.stale

    def column(name: str) -> np.ndarray | None:
        return _padded([getattr(sample, name) for sample in samples], prompt_lengths, shape)

    return MicroBatch(
        input_ids=input_ids,
        lengths=lengths,
        prompt_lengths=prompt_lengths,
        behaviour_logprobs=behaviour,
        advantages=advantages,
        loss_weight=weight,
        stale=stale,
        reference_logprobs=column("reference_logprobs"),
        old_logprobs=column("old_logprobs"),
        old_values=column("old_values"),
        returns=column("returns"),
        routes=_padded_routes(samples, prompt_lengths, shape),
    )


def _padded_routes(samples: Sequence[TrainSample], starts: np.ndarray, shape: tuple[int, int]) -> np.ndarray | None:
    """uint8[B, T, bytes] of all samples, 0 (not known) for those without routes; None: there are none."""
    told = [(row, sample.routes) for row, sample in enumerate(samples) if sample.routes is not None]
    if not told:
        return None
    padded = np.zeros((*shape, told[0][1].shape[1]), np.uint8)
    for row, routes in told:
        padded[row, starts[row] : starts[row] + len(routes)] = routes
    return padded


def _padded(scores: Sequence[np.ndarray | None], starts: np.ndarray, shape: tuple[int, int]) -> np.ndarray | None:
    known = [score for score in scores if score is not None]
    if len(known) < len(scores):
        return None
    padded = np.zeros(shape, np.float32)
    for row, (score, start) in enumerate(zip(known, starts.tolist(), strict=True)):
        padded[row, start : start + score.size] = score
    return padded
