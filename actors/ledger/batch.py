"""One step's samples in columns.

Invariants
- Row r is sibling ``r % group_size`` of prompt ``prompts[r // group_size]``; columns change their length only where
  a batch is extended, behind its last row.
- Row r's response is ``tokens[r, :length[r]]``, with each token's log-probability and policy version beside it.
- The token matrices are zeroed lazily by the operating system: a row costs memory for the pages that it has reached,
  not for ``max_tokens``.

        queued → assigned → streaming → finished → scored → granted → committed
           ▲________│___________│           └── dropped(reason), from any state before granted
"""

from __future__ import annotations

import enum
import functools
from dataclasses import dataclass

import numpy as np

from actors.host.host_memory import zeros_by_page
from actors.ledger.errors import IllegalTransition
from actors.ledger.events import BatchExtended, BatchIssued


class SampleState(enum.IntEnum):
    """A sample is in exactly one of these states."""

    QUEUED = 0
    ASSIGNED = 1
    STREAMING = 2
    FINISHED = 3
    SCORED = 4
    GRANTED = 5
    COMMITTED = 6
    DROPPED = 7


IN_FLIGHT = (SampleState.ASSIGNED, SampleState.STREAMING)
_COLUMNS = (
    *("state", "length", "finish", "reward", "reward_parts", "assignment", "former", "holder", "attempts"),
    *("failures", "crashes"),
)
"""Columns of a batch with an entry a row, beside those of tokens."""


@dataclass(frozen=True, slots=True)
class Ragged:
    """The responses of some rows stand end to end: row i owns the next ``lengths[i]`` entries."""

    rows: np.ndarray  # int32[n]
    lengths: np.ndarray  # int32[n]
    tokens: np.ndarray  # int32[sum(lengths)]
    logprobs: np.ndarray  # float32[sum(lengths)]
    versions: np.ndarray  # int32[sum(lengths)]


class StepBatch:
    """It holds all samples of one training step."""

    def __init__(self, event: BatchIssued) -> None:
        prompts = event.prompts
        if len(prompts) == 0 or event.group_size < 1 or np.any(np.diff(prompts) <= 0):
            raise IllegalTransition(
                f"step {event.step}: a batch needs prompts in strictly increasing order and a group"
            )
        if len(event.contexts) != len(prompts) or int(event.prompt_lengths.sum()) != len(event.prompt_ids):
            raise IllegalTransition(f"step {event.step}: contexts or prompt ids do not fit {len(prompts)} prompts")
        self.step = event.step
        self.group_size = event.group_size
        self.sampling = event.sampling
        self.prompts = prompts
        self.prompt_ids: list[np.ndarray] = np.split(event.prompt_ids, np.cumsum(event.prompt_lengths)[:-1])
        self.prompt_tokens = len(event.prompt_ids) / len(prompts)
        """Mean length of the prompts."""
        self.contexts = event.contexts
        self.beside_step = -1
        """Newest step that had been issued before this batch, where it evaluates a version."""
        n, t = len(prompts) * event.group_size, event.sampling.max_tokens
        self.stop_ids = np.asarray(event.sampling.stop_token_ids, np.int32)
        self.state = np.zeros(n, np.uint8)
        self.length = np.zeros(n, np.int32)
        self.finish = np.zeros(n, np.uint8)
        self.reward = np.full(n, np.nan)
        self.reward_parts = np.zeros((n, 0))
        """Rewards that ``reward`` is the weighted sum of, a column each; no column where there is one only."""
        self.assignment = np.full(n, -1, np.int64)
        self.former = np.full(n, -1, np.int64)
        """Assignment that a former life of the scheduler gave to ``holder``; -1 if another one was given since."""
        self.holder = np.full(n, -1, np.int32)
        self.attempts = np.zeros(n, np.int32)
        self.failures = np.zeros(n, np.int32)
        self.crashes = np.zeros(n, np.int32)
        """Engines that crashed while they held the row and it could have been why; from 1 on it is a suspect."""
        self.drop_reasons: dict[int, str] = {}
        self._tokens = zeros_by_page((n, t), np.int32)
        self._logprobs = zeros_by_page((n, t), np.float32)
        self._versions = zeros_by_page((n, t), np.int32)
        self._archive: Ragged | None = None

    def extend(self, more: BatchExtended) -> None:
        """Append the rows of further prompts. Every other row keeps its number and all that it holds.

        Raises:
            IllegalTransition: it is committed, or the prompts do not follow on its own.
        """
        if self.committed or not len(more.prompts) or int(more.prompts[0]) <= int(self.prompts[-1]):
            raise IllegalTransition(f"step {self.step}: cannot extend it by prompts {more.prompts.tolist()}")
        added = StepBatch(
            BatchIssued(
                self.step, self.group_size, self.sampling, more.prompts, more.prompt_lengths, more.prompt_ids,
                more.contexts,
            )
        )  # fmt: skip
        before, tokens = len(self), self.prompt_tokens * len(self.prompts)
        self.prompts = np.concatenate([self.prompts, more.prompts])
        self.prompt_tokens = (tokens + len(more.prompt_ids)) / len(self.prompts)
        self.prompt_ids += added.prompt_ids
        self.contexts = [*self.contexts, *more.contexts]
        added.reward_parts = np.full((len(added), self.reward_parts.shape[1]), np.nan)
        for name in _COLUMNS:
            setattr(self, name, np.concatenate([getattr(self, name), getattr(added, name)]))
        width = int(self.length[:before].max(initial=0))
        for name in ("_tokens", "_logprobs", "_versions"):
            held = getattr(self, name)
            whole = zeros_by_page((len(self), self.sampling.max_tokens), held.dtype)
            whole[:before, :width] = held[:, :width]
            setattr(self, name, whole)

    def __len__(self) -> int:
        return len(self.state)

    @property
    def committed(self) -> bool:
        return self._archive is not None

    @property
    def generating(self) -> bool:
        """Whether some samples have not finished."""
        return bool((self.state < SampleState.FINISHED).any())

    def rows_of(self, prompts: np.ndarray, siblings: np.ndarray) -> np.ndarray:
        """int32[n] rows of the named samples.

        Raises:
            IllegalTransition: a prompt or sibling is not of this batch.
        """
        if len(prompts) != len(siblings):
            raise IllegalTransition(f"step {self.step}: {len(prompts)} prompts but {len(siblings)} siblings")
        index = np.minimum(np.searchsorted(self.prompts, prompts), len(self.prompts) - 1)
        if np.any(self.prompts[index] != prompts) or np.any(siblings < 0) or np.any(siblings >= self.group_size):
            raise IllegalTransition(f"step {self.step}: some of the named samples are not of its batch")
        return (index * self.group_size + siblings).astype(np.int32)

    def prompts_of(self, rows: np.ndarray) -> np.ndarray:
        return self.prompts[rows // self.group_size]

    def group_rows(self, index: int) -> np.ndarray:
        """The rows of the ``index``-th prompt."""
        return np.arange(index * self.group_size, (index + 1) * self.group_size, dtype=np.int32)

    def require(self, rows: np.ndarray, states: tuple[SampleState, ...], doing: str) -> None:
        """Raises IllegalTransition unless each row exists, is named once, and is in one of ``states``."""
        if len(rows) and (int(rows.min()) < 0 or int(rows.max()) >= len(self)):
            raise IllegalTransition(f"step {self.step}: cannot {doing}: a row is outside 0..{len(self) - 1}")
        named = np.zeros(len(self), np.bool_)
        named[rows] = True
        if np.count_nonzero(named) != len(rows):
            raise IllegalTransition(f"step {self.step}: cannot {doing}: a sample is named twice")
        fits = one_of(*states)[self.state[rows]]
        if not fits.all():
            row = int(rows[~fits][0])
            raise IllegalTransition(
                f"step {self.step}: cannot {doing} prompt {int(self.prompts[row // self.group_size])} sibling"
                f" {row % self.group_size}: it is {SampleState(int(self.state[row])).name.lower()}, not"
                f" {' or '.join(s.name.lower() for s in states)}"
            )

    def put(
        self,
        rows: np.ndarray,
        offsets: np.ndarray,
        counts: np.ndarray,
        tokens: np.ndarray,
        logprobs: np.ndarray,
        versions: np.ndarray | int,
    ) -> None:
        """Write ``counts[i]`` tokens of ``versions[i]`` into ``rows[i]`` from ``offsets[i]`` on; all lie end to end."""
        at = rows.astype(np.int64) * self.sampling.max_tokens + offsets  # one index: numpy scatters by two half as fast
        if len(tokens) != len(rows) or (counts != 1).any():
            at = np.repeat(at - (np.cumsum(counts) - counts), counts) + np.arange(len(tokens))
            versions = versions if isinstance(versions, int) else np.repeat(versions, counts)
        self._tokens.reshape(-1)[at] = tokens
        self._logprobs.reshape(-1)[at] = logprobs
        self._versions.reshape(-1)[at] = versions

    def held(self, row: int) -> np.ndarray:
        """int32[length] response tokens of a row that is not committed."""
        return self._tokens[row, : self.length[row]]

    def newest_version(self, rows: np.ndarray) -> int:
        """The newest version of any token of ``rows``, which are not committed; -1 if they have none."""
        rows = rows[self.length[rows] > 0]
        return int(self._versions[rows, self.length[rows] - 1].max(initial=-1))

    def newest_versions(self, rows: np.ndarray) -> np.ndarray:
        """int32[n] version of the last token of each of ``rows``, which are not committed; -1 where there is none."""
        length = self.length[rows]
        return np.where(length > 0, self._versions[rows, np.maximum(length - 1, 0)], -1)

    def ended(self, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Which rows hold a stop token at their end, and which of the others have spent their budget; bool[n] each."""
        length = self.length[rows]
        last = self._tokens[rows, np.maximum(length - 1, 0)]
        stopped = (length > 0) & np.isin(last, self.stop_ids)
        return stopped, ~stopped & (length >= self.sampling.max_tokens)

    def ragged(self, rows: np.ndarray) -> Ragged:
        """The responses of ``rows``, copied."""
        if self._archive is not None:
            return _select(self._archive, rows)
        lengths = self.length[rows]
        width = int(lengths.max(initial=0))
        mask = np.arange(width) < lengths[:, None]
        return Ragged(
            rows,
            lengths,
            self._tokens[rows, :width][mask],
            self._logprobs[rows, :width][mask],
            self._versions[rows, :width][mask],
        )

    def archive(self) -> None:
        """Keep the responses end to end and give the matrices back; after a commit no token is added."""
        self._archive = self.ragged(np.arange(len(self), dtype=np.int32))
        self._tokens = self._logprobs = self._versions = np.zeros((0, 0), np.int32)


def _select(archive: Ragged, rows: np.ndarray) -> Ragged:
    """The entries of ``rows`` of an archive that holds every row in order."""
    ends = np.cumsum(archive.lengths)
    lengths = archive.lengths[rows]
    starts = ends[rows] - lengths
    at = ragged_positions(lengths) + np.repeat(starts, lengths)
    return Ragged(rows, lengths, archive.tokens[at], archive.logprobs[at], archive.versions[at])


@functools.cache
def one_of(*states: SampleState) -> np.ndarray:
    """bool[8] by state; ``one_of(...)[batch.state]`` costs a tenth of ``np.isin``."""
    table = np.zeros(len(SampleState), np.bool_)
    table[list(states)] = True
    table.flags.writeable = False
    return table


def ragged_positions(counts: np.ndarray) -> np.ndarray:
    """0..counts[0]-1, 0..counts[1]-1, … as int64[sum(counts)]."""
    return np.arange(int(counts.sum())) - np.repeat(np.cumsum(counts) - counts, counts)
