"""What the scheduler sends the trainer in a step: finished samples, many in one message, end to end in columns.

    scheduler ──GrantGroups───▶ trainer     whole groups, to be trained; each once for each opening of the step
    scheduler ──EarlySamples──▶ trainer     samples whose siblings are not settled yet, for what needs no advantage

EarlySamples are advice: a trainer that does not get them, or forgets them, computes the same later.
"""

from __future__ import annotations

from collections.abc import Iterator

import msgspec
import numpy as np

from actors.core.message import Message, message


class GroupGrant(msgspec.Struct):
    """Holds one finished, scored group. Columns are ragged by sibling: row i owns ``lengths[i]`` entries."""

    job: str
    step: int
    prompt: int
    replay: bool
    prompt_ids: np.ndarray  # int32[p]
    siblings: np.ndarray  # int32[g]
    lengths: np.ndarray  # int32[g]
    tokens: np.ndarray  # int32[sum(lengths)]
    logprobs: np.ndarray  # float32[sum(lengths)]
    versions: np.ndarray  # int32[sum(lengths)], policy version of each token
    finished: np.ndarray  # uint8[g], FinishReason
    rewards: np.ndarray  # float64[g]
    routes: np.ndarray | None = None
    """uint8[sum(lengths), bytes], the experts that predicted each token (``actors/models/routers.py``)."""


@message("trainer.grant_groups")
class GrantGroups(Message):
    """The scheduler grants groups, end to end in columns: one message per group would cost more than its content.

    Group i owns ``prompt_lengths[i]`` of the ``prompt_ids`` and ``sizes[i]`` rows; row j owns ``lengths[j]`` tokens.
    """

    job: str
    step: int
    replay: bool
    prompts: np.ndarray  # int64[n]
    prompt_lengths: np.ndarray  # int32[n]
    prompt_ids: np.ndarray  # int32[sum(prompt_lengths)]
    sizes: np.ndarray  # int32[n]
    siblings: np.ndarray  # int32[r], r = sum(sizes)
    lengths: np.ndarray  # int32[r]
    tokens: np.ndarray  # int32[sum(lengths)]
    logprobs: np.ndarray  # float32[sum(lengths)]
    versions: np.ndarray  # int32[sum(lengths)]
    finished: np.ndarray  # uint8[r]
    rewards: np.ndarray  # float64[r]
    routes: np.ndarray | None = None  # uint8[sum(lengths), bytes]

    def split(self) -> list[GroupGrant]:
        """The groups one by one, as views.

        Raises:
            ValueError: the columns do not fit together; names the column.
        """
        self._check()
        rows, ids = np.cumsum(self.sizes).tolist(), np.cumsum(self.prompt_lengths).tolist()
        ends = np.concatenate([[0], np.cumsum(self.lengths)])
        groups: list[GroupGrant] = []
        row = first = 0
        for i, prompt in enumerate(self.prompts.tolist()):
            r, t = slice(row, rows[i]), slice(int(ends[row]), int(ends[rows[i]]))
            groups.append(
                GroupGrant(
                    self.job, self.step, prompt, self.replay, self.prompt_ids[first : ids[i]], self.siblings[r],
                    self.lengths[r], self.tokens[t], self.logprobs[t], self.versions[t], self.finished[r],
                    self.rewards[r], None if self.routes is None else self.routes[t],
                )
            )  # fmt: skip
            row, first = rows[i], ids[i]
        return groups

    def _check(self) -> None:
        r, t = len(self.siblings), len(self.tokens)
        wanted = (
            _of_all(self)
            | {
                "finished": (len(self.finished), r),
                "rewards": (len(self.rewards), r),
                "logprobs": (len(self.logprobs), t),
                "versions": (len(self.versions), t),
            }
            | ({} if self.routes is None else {"routes": (len(self.routes), t)})
        )
        _check_columns(self, f"groups of step {self.step}", wanted)


@message("trainer.early_samples")
class EarlySamples(Message):
    """The scheduler sends scored samples of incomplete groups ahead, in some of the columns of ``GrantGroups``."""

    job: str
    step: int
    prompts: np.ndarray  # int64[n]
    prompt_lengths: np.ndarray  # int32[n]
    prompt_ids: np.ndarray  # int32[sum(prompt_lengths)]
    sizes: np.ndarray  # int32[n], of each prompt's samples in this message
    siblings: np.ndarray  # int32[r], r = sum(sizes)
    lengths: np.ndarray  # int32[r]
    tokens: np.ndarray  # int32[sum(lengths)]

    def split(self) -> Iterator[tuple[int, int, np.ndarray, np.ndarray]]:
        """(prompt, sibling, prompt ids int32[p], tokens int32[t]) of each sample, as views.

        Raises:
            ValueError: the columns do not fit together; names the column.
        """
        _check_columns(self, f"early samples of step {self.step}", _of_all(self))
        groups = np.repeat(np.arange(len(self.prompts)), self.sizes).tolist()
        ids = np.split(self.prompt_ids, np.cumsum(self.prompt_lengths)[:-1])
        responses = np.split(self.tokens, np.cumsum(self.lengths)[:-1])
        for group, sibling, tokens in zip(groups, self.siblings.tolist(), responses, strict=False):
            yield int(self.prompts[group]), sibling, ids[group], tokens


def _of_all(columns: GrantGroups | EarlySamples) -> dict[str, tuple[int, int]]:
    """Column → (entries, entries that there should be), of the columns that both messages have."""
    n, r = len(columns.prompts), len(columns.siblings)
    return {
        "prompt_lengths": (len(columns.prompt_lengths), n),
        "prompt_ids": (len(columns.prompt_ids), int(columns.prompt_lengths.sum())),
        "sizes": (len(columns.sizes), n),
        "siblings": (r, int(columns.sizes.sum())),
        "lengths": (len(columns.lengths), r),
        "tokens": (len(columns.tokens), int(columns.lengths.sum())),
    }


def _check_columns(columns: GrantGroups | EarlySamples, what: str, wanted: dict[str, tuple[int, int]]) -> None:
    for column, (has, expected) in wanted.items():
        if has != expected:
            raise ValueError(f"{what}: {column} has {has} entries, expected {expected}")
    for column in ("sizes", "prompt_lengths", "lengths"):
        if len(counts := getattr(columns, column)) and int(counts.min()) < 0:
            raise ValueError(f"{what}: {column} has a negative entry")
