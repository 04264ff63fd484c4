"""The groups of one step while they are still arriving, and which of them may be trained together.

    GrantGroups (any order) ─ split ─▶ Inbox ─ windows of prompt ordinals ─▶ samples (``learning/samples.py``)

Always true
- With ``in_order`` a window is a fixed range of prompt ordinals, handed out in prompt order: the micro-batches, and so
  the gradient sums, are the same, bit for bit, whatever arrived first.
- Without it, a window is whatever has come, once that is enough (``window_prompts``, or ``saturation_tokens`` if given)
  or the rest of the step: a trainer that lags behind finds more and computes it together.
- Prompts that were dropped never come, and prompts outside the expected range may: both are settled when
  ``StepGranted`` says that nothing more will come.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from actors.protocol.groups import GrantGroups, GroupGrant
from actors.trainer.consumption import Consumption
from actors.trainer.errors import BadGrant


def split(message: GrantGroups) -> list[GroupGrant]:
    """The groups of one message. Raises BadGrant when its columns do not fit together."""
    try:
        return message.split()
    except ValueError as error:
        raise BadGrant(str(error)) from error


def tokens_of(groups: Iterable[GroupGrant]) -> int:
    """Prompt and response tokens of all samples of ``groups``."""
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
        """Whether there is no such step, and none after it."""
        self.changed: int | None = None
        """Prompt that was handed out and then granted again with other samples, which makes the step void."""
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

        A newer grant with other samples replaces the one that is here; if that was handed out, ``changed`` tells.
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
        """Note that the scheduler has sent all ``groups`` groups of the step; ``never``: there is no such step."""
        self._sent, self.never = groups, never

    def reopen(self) -> None:
        """Wait for all of the step again, which a scheduler's next life grants once more."""
        self._sent = None

    @property
    def complete(self) -> bool:
        """Whether nothing more will come, and all that was sent is here."""
        return self._sent is not None and len(self.groups) >= self._sent

    @property
    def has_lost_groups(self) -> bool:
        """Whether the scheduler has sent more than came, since a link broke. Opening the step again cures it."""
        return self._sent is not None and len(self.groups) < self._sent

    @property
    def missing(self) -> int:
        """How many of the expected prompts have not come, for reports."""
        return sum(prompt not in self.groups for prompt in self._expected)

    @property
    def exhausted(self) -> bool:
        """Whether the step is complete and all of it handed out; or there is no such step, whatever of it has come."""
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
        """The next fixed windows, up to the first that is not whole."""
        windows: list[list[GroupGrant]] = []
        for window in sorted(self._windows):
            members = self._windows[window]
            if not (self.complete or all(prompt in self.groups for prompt in members)):
                break
            del self._windows[window]
            windows.append([self.groups[prompt] for prompt in members if prompt in self.groups])
        return windows

    def _lump(self) -> list[list[GroupGrant]]:
        """All groups that are here, if they are enough for a window or the last that are expected."""
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
