"""Groups to micro-batches, while the step's groups are still arriving.

    GrantGroups (any order) ─▶ Inbox ─ windows of prompt ordinals ─▶ Window ─ cut ─▶ MicroBatch*

Always true
- With ``in_order`` a window is a fixed range of prompt ordinals, handed out in prompt order: what is cut together, and
  so the gradient sums, are the same, bit for bit, whatever arrived first.
- Without, a window is whatever has come, once that is enough (``window_prompts``, or ``saturation_tokens`` where they
  are given) or all that is missing: a trainer that lags behind finds more and computes it together.
- Prompts that were dropped never come, and prompts outside the expected range may: both are settled when
  ``StepGranted`` says that nothing more will come.
- Samples of advantage 0 are counted but not computed, unless something else gives them a gradient.
- Tokens of an environment, whose version is below 0, stand in the input; nothing is learned from them, and they count
  in no length and in no mean.
- Each token of the model stands in one sequence as one that is learned from: where an environment has begun a fresh
  context, what it repeats of earlier ones is its own.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from actors.protocol.episodes import FRESH
from actors.protocol.groups import GrantGroups, GroupGrant
from actors.protocol.marks import contexts
from actors.trainer.backend import MicroBatch
from actors.trainer.consumption import Consumption
from actors.trainer.errors import BadGrant
from actors.trainer.rules import LearningRule


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainSample:
    """Holds one response with its advantage, ready to be learned from. r response tokens.

    An episode is one for each of its contexts.
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
    """One for all tokens, or float32[r]. Of rules that whiten it is the score at first (``step_estimates``)."""
    mask: np.ndarray | None = None
    """bool[r]: tokens of the model, from which alone is learned; None: all."""
    weight: float = 1.0
    """Weight of each of these tokens in the loss."""
    reference_logprobs: np.ndarray | None = None  # float32[r]
    old_logprobs: np.ndarray | None = None
    """float32[r]: of the policy, under the weights before the step."""
    old_values: np.ndarray | None = None  # float32[r]
    returns: np.ndarray | None = None  # float32[r]

    @property
    def name(self) -> tuple[int, int, int]:
        """What tells it from all others of its step."""
        return self.prompt, self.sibling, self.context

    @property
    def length(self) -> int:
        return self.prompt_ids.size + self.tokens.size

    @property
    def model_tokens(self) -> int:
        """Tokens that are learned from."""
        return self.tokens.size if self.mask is None else int(np.count_nonzero(self.mask))


def split(message: GrantGroups) -> list[GroupGrant]:
    """The groups of one message. Raises BadGrant when its columns do not fit together."""
    try:
        return message.split()
    except ValueError as error:
        raise BadGrant(str(error)) from error


def group_samples(group: GroupGrant, rule: LearningRule, *, max_staleness: int) -> list[TrainSample]:
    """The samples of one granted group, in sibling order, and of each episode its contexts in their order.

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
        )
        samples += [sample] if group.prompt_ids.size else in_contexts(sample, group.versions[start:end])
        start = end
    return sorted(samples, key=lambda sample: (sample.sibling, sample.context))


def in_contexts(episode: TrainSample, marks: np.ndarray) -> list[TrainSample]:
    """A sequence for each context of an episode in which the model has said something, up to its last token there.

    What the environment wrote first is the prompt of it. The advantage, and the weight of a token, are the episode's.
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

    With old log-probabilities, those of the reference model, values and returns if all of them have theirs.
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
    )


def _padded(scores: Sequence[np.ndarray | None], starts: np.ndarray, shape: tuple[int, int]) -> np.ndarray | None:
    known = [score for score in scores if score is not None]
    if len(known) < len(scores):
        return None
    padded = np.zeros(shape, np.float32)
    for row, (score, start) in enumerate(zip(known, starts.tolist(), strict=True)):
        padded[row, start : start + score.size] = score
    return padded


def tokens_of(groups: Iterable[GroupGrant]) -> int:
    """Prompt and response tokens of all their samples."""
    return sum(int(group.lengths.sum()) + group.prompt_ids.size * group.siblings.size for group in groups)


class Inbox:
    """Gathers the groups of one step: what came, what may be trained now, what is still missing.

    >>> inbox = Inbox(step=0, expected=range(0, 4), plan=Consumption(window_prompts=2, in_order=True))

    ``add`` takes groups in any order and says whether a group was new; ``ready`` hands out windows as lists of
    groups in prompt order, each group exactly once; ``close`` says how many groups the scheduler has sent.
    """

    def __init__(self, *, step: int, expected: range, plan: Consumption) -> None:
        self.step = step
        self.groups: dict[int, GroupGrant] = {}
        self.never = False
        """There is no such step, and none after it."""
        self.changed: int | None = None
        """A prompt that has been handed out and was granted again with other samples: the step is void."""
        size = plan.window_prompts
        self._windows = {w: self._members(w, expected, size) for w in self._range(expected, size)}
        self._expected = expected
        self._plan = plan
        self._handed_out: set[int] = set()
        self._sent: int | None = None

    @staticmethod
    def _range(expected: range, size: int) -> range:
        return range(-(-len(expected) // size))

    @staticmethod
    def _members(window: int, expected: range, size: int) -> tuple[int, ...]:
        return tuple(expected[window * size : (window + 1) * size])

    def add(self, group: GroupGrant) -> bool:
        """Take a group. False: it is of another step or already here.

        One that is here with other samples, and not handed out yet, is replaced: the newest grant is what counts.
        """
        if group.step != self.step:
            return False
        known = self.groups.get(group.prompt)
        if known is not None:
            if not _same_samples(known, group):
                if group.prompt in self._handed_out:
                    self.changed = group.prompt
                self.groups[group.prompt] = group
            return False
        self.groups[group.prompt] = group
        return True

    def close(self, groups: int, *, never: bool = False) -> None:
        """The scheduler has sent ``groups`` groups, all of the step; ``never``: there is no such step."""
        self._sent, self.never = groups, never

    def reopen(self) -> None:
        """The step is granted once more, to a scheduler's next life: ``complete`` again when that has sent all of
        it.
        """
        self._sent = None

    @property
    def complete(self) -> bool:
        """Nothing more will come, and all that was sent is here."""
        return self._sent is not None and len(self.groups) >= self._sent

    @property
    def has_lost_groups(self) -> bool:
        """The scheduler has sent more than came: a link broke in between. Opening the step again cures it."""
        return self._sent is not None and len(self.groups) < self._sent

    @property
    def missing(self) -> int:
        """How many of the expected prompts have not come, for reports."""
        return sum(prompt not in self.groups for prompt in self._expected)

    @property
    def exhausted(self) -> bool:
        """Complete, and everything has been handed out; or there is no such step, whatever of it has come."""
        return self.never or (self.complete and len(self._handed_out) == len(self.groups))

    def ready(self) -> list[list[GroupGrant]]:
        """The windows that can be trained now and were not handed out before."""
        if self._plan.is_whole and not self.complete:
            return []
        windows = self._ranges() if self._plan.in_order else self._lump()
        if self.complete:
            extra = sorted(prompt for prompt in self.groups if prompt not in self._expected)
            windows.append([self.groups[prompt] for prompt in extra if prompt not in self._handed_out])
        if self._plan.is_whole:
            windows = [[group for window in windows for group in window]]
        windows = [window for window in windows if window]
        self._handed_out.update(group.prompt for window in windows for group in window)
        return windows

    def _ranges(self) -> list[list[GroupGrant]]:
        """The next fixed windows, as long as they are whole."""
        windows: list[list[GroupGrant]] = []
        for window in sorted(self._windows):
            members = self._windows[window]
            if not (self.complete or all(prompt in self.groups for prompt in members)):
                break
            del self._windows[window]
            windows.append([self.groups[prompt] for prompt in members if prompt in self.groups])
        return windows

    def _lump(self) -> list[list[GroupGrant]]:
        """Everything that is here, if it is enough for a window or the last that is expected."""
        here = sorted(prompt for prompt in self.groups if prompt in self._expected and prompt not in self._handed_out)
        left = len(self._expected) - sum(prompt in self._expected for prompt in self._handed_out)
        groups = [self.groups[prompt] for prompt in here]
        if not here or not (self.complete or len(here) >= left or self._is_enough(groups)):
            return []
        return [groups]

    def _is_enough(self, groups: list[GroupGrant]) -> bool:
        enough_tokens = self._plan.saturation_tokens
        return tokens_of(groups) >= enough_tokens if enough_tokens else len(groups) >= self._plan.window_prompts


def _same_samples(one: GroupGrant, other: GroupGrant) -> bool:
    fields = ("siblings", "lengths", "tokens", "rewards")
    return all(np.array_equal(getattr(one, field), getattr(other, field)) for field in fields)
