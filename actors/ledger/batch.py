"""One step's samples in columns.

Invariants
- Row r is sibling ``r % group_size`` of prompt ``prompts[r // group_size]``; columns change their length only where
  a batch is extended, behind its last row.
- Row r's response is ``tokens[r, :length[r]]``, with each token's log-probability and policy version beside it.
- Of an episode the environment's tokens stand in the response too; ``versions`` marks each (``protocol/episodes.py``).
- The token matrices are zeroed lazily by the operating system: a row costs memory for the pages that it has reached,
  not for ``width``.

        queued → assigned → streaming → finished → scored → granted → committed
           ▲________│___________│           └── dropped(reason), from any state before granted, or left out by a commit

    episodes: waiting ─Turned─▶ queued → assigned → streaming ─▶ waiting ─EpisodesEnded─▶ scored → granted → committed
"""

from __future__ import annotations

import enum
import functools
from dataclasses import dataclass

import numpy as np

from actors.host.host_memory import zeros_by_page
from actors.ledger.errors import IllegalTransition
from actors.ledger.events import BatchExtended, BatchIssued
from actors.protocol.episodes import ENVIRONMENT, EpisodeLimits


class SampleState(enum.IntEnum):
    """Names the states of a sample, which is in exactly one of them."""

    QUEUED = 0
    ASSIGNED = 1
    STREAMING = 2
    WAITING = 3
    """Waiting for its environment, as only an episode does."""
    FINISHED = 4
    SCORED = 5
    GRANTED = 6
    COMMITTED = 7
    DROPPED = 8


IN_FLIGHT = (SampleState.ASSIGNED, SampleState.STREAMING)
_COLUMNS = (
    *("state", "length", "finish", "reward", "reward_parts", "assignment", "former", "holder", "attempts"),
    *("failures", "crashes", "limit", "turns", "lives", "last_worker"),
)
"""Columns of a batch with one entry per row; the columns of tokens are apart."""


@dataclass(frozen=True, slots=True)
class Ragged:
    """Holds the responses of some rows, end to end: row i owns the next ``lengths[i]`` entries."""

    rows: np.ndarray  # int32[n]
    lengths: np.ndarray  # int32[n]
    tokens: np.ndarray  # int32[sum(lengths)]
    logprobs: np.ndarray  # float32[sum(lengths)]
    versions: np.ndarray  # int32[sum(lengths)]
    routes: np.ndarray | None = None  # uint8[sum(lengths), bytes], as in TokensAppended

    @property
    def said(self) -> np.ndarray:
        """int64[n] number of the model's own tokens in each row."""
        ends = np.cumsum(self.lengths)
        counts = np.append(0, np.cumsum(self.versions >= 0))
        return counts[ends] - counts[ends - self.lengths]


class StepBatch:
    """Holds all samples of one training step, or of one evaluation, from its issue until its step is forgotten.

    batch = StepBatch(BatchIssued(step=7, group_size=8, ...))          # 32 prompts: rows 0 … 255, all queued
    rows = batch.rows_of(prompts, siblings)                            # a sample by its name ↔ its row
    batch.require(rows, (SampleState.QUEUED,), "assign")               # or IllegalTransition, before anything changes
    batch.put(rows, offsets, counts, tokens, logprobs, versions)       # what a report brings, all rows at once
    stopped, spent = batch.ended(rows)                                 # which of them are over by now
    batch.archive()                                                    # committed: only the responses are kept
    """

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
        """Mean length of the prompts, in tokens."""
        self.contexts = event.contexts
        self.beside_step = -1
        """Newest step that had been issued before this batch, if it evaluates a version; else -1."""
        self.episodes = event.episodes
        """Bounds of the episodes; None: each prompt is answered once."""
        if event.episodes is not None:
            _check_limits(event, event.episodes)
        self.width = event.sampling.max_tokens if event.episodes is None else event.episodes.episode_tokens
        """Number of tokens that a row has at most."""
        n, t = len(prompts) * event.group_size, self.width
        self.stop_ids = np.asarray(event.sampling.stop_token_ids, np.int32)
        begins = SampleState.QUEUED if event.episodes is None else SampleState.WAITING
        self.state = np.full(n, begins, np.uint8)
        self.length = np.zeros(n, np.int32)
        self.finish = np.zeros(n, np.uint8)
        self.reward = np.full(n, np.nan)
        self.reward_parts = np.zeros((n, 0))
        """Rewards that ``reward`` is the weighted sum of, a column each; no column if there is only one."""
        self.assignment = np.full(n, -1, np.int64)
        self.former = np.full(n, -1, np.int64)
        """Assignment that a former life of the scheduler gave to ``holder``; -1 if the row was handed out since."""
        self.holder = np.full(n, -1, np.int32)
        self.last_worker = np.full(n, -1, np.int32)
        """Worker to which the row was handed out last; -1: to none yet."""
        self.attempts = np.zeros(n, np.int32)
        """Number of times that the row was handed out; of an episode: in its present turn."""
        self.failures = np.zeros(n, np.int32)
        self.crashes = np.zeros(n, np.int32)
        """Number of engines that crashed while they held the row, maybe because of it; from 1 on it is a suspect."""
        self.limit = np.full(n, t, np.int32)
        """Position at which the present turn ends at the latest."""
        self.turns = np.zeros(n, np.int32)
        """Number of turns that the model has taken or is taking; 0 if there are no episodes."""
        self.lives = np.zeros(n, np.int32)
        """Number of lives of the environment so far: ``EpisodeName.attempt`` of the present one."""
        self.drop_reasons: dict[int, str] = {}
        self._tokens = zeros_by_page((n, t), np.int32)
        self._logprobs = zeros_by_page((n, t), np.float32)
        self._versions = zeros_by_page((n, t), np.int32)
        self._routes: np.ndarray | None = None
        """uint8[n, t, bytes], all 0 where not known; None: no token has come with any."""
        self._archive: Ragged | None = None

    def extend(self, more: BatchExtended) -> None:
        """Append the rows of further prompts. Every other row keeps its number and all that it holds.

        Raises:
            IllegalTransition: the batch is committed, or the prompts do not follow on those that it has.
        """
        if self.committed or not len(more.prompts) or int(more.prompts[0]) <= int(self.prompts[-1]):
            raise IllegalTransition(f"step {self.step}: cannot extend it by prompts {more.prompts.tolist()}")
        added = StepBatch(
            BatchIssued(
                self.step, self.group_size, self.sampling, more.prompts, more.prompt_lengths, more.prompt_ids,
                more.contexts, self.episodes,
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
            whole = zeros_by_page((len(self), self.width), held.dtype)
            whole[:before, :width] = held[:, :width]
            setattr(self, name, whole)
        if (held := self._routes) is not None:
            self._routes = zeros_by_page((len(self), self.width, held.shape[2]), np.uint8)
            self._routes[:before, :width] = held[:, :width]

    def __len__(self) -> int:
        return len(self.state)

    @property
    def committed(self) -> bool:
        return self._archive is not None

    @property
    def generating(self) -> bool:
        """Whether some samples are still to be generated."""
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
        routes: np.ndarray | None = None,
    ) -> None:
        """Write ``counts[i]`` tokens of ``versions[i]`` into ``rows[i]`` from ``offsets[i]`` on; all lie end to end."""
        at = rows.astype(np.int64) * self.width + offsets  # one index: numpy scatters by two half as fast
        if len(tokens) != len(rows) or (counts != 1).any():
            at = np.repeat(at - (np.cumsum(counts) - counts), counts) + np.arange(len(tokens))
            versions = versions if isinstance(versions, int) else np.repeat(versions, counts)
        self._tokens.reshape(-1)[at] = tokens
        self._logprobs.reshape(-1)[at] = logprobs
        self._versions.reshape(-1)[at] = versions
        if routes is not None and self._routes is None:
            self._routes = zeros_by_page((len(self), self.width, routes.shape[1]), np.uint8)
        if self._routes is not None:
            self._routes.reshape(-1, self._routes.shape[2])[at] = 0 if routes is None else routes

    @property
    def route_bytes(self) -> int:
        """Bytes of a token's routes; 0: no token has any."""
        held = self._routes if self._archive is None else self._archive.routes
        return 0 if held is None else held.shape[-1]

    def check_routes(self, routes: np.ndarray) -> None:
        """Raises IllegalTransition unless tokens of this batch have as many bytes of ``routes`` each."""
        if self._routes is not None and routes.shape[1] != self._routes.shape[2]:
            raise IllegalTransition(
                f"step {self.step}: routes of {routes.shape[1]} bytes a token, after others of {self._routes.shape[2]}"
            )

    def put_marked(self, row: int, tokens: np.ndarray, mark: int) -> None:
        """Append tokens of an environment to ``row``; ``mark`` is the mark of the first one."""
        start = self.length[row]
        at = slice(start, start + len(tokens))
        self._tokens[row, at], self._logprobs[row, at], self._versions[row, at] = tokens, 0.0, ENVIRONMENT
        self._versions[row, start] = mark
        if self._routes is not None:
            self._routes[row, at] = 0
        self.length[row] += len(tokens)

    def held(self, row: int) -> np.ndarray:
        """int32[length] response tokens of a row that is not committed."""
        return self._tokens[row, : self.length[row]]

    def marks(self, row: int) -> np.ndarray:
        """int32[length] marks of a row that is not committed: the version of each token, or < 0: not the model's."""
        return self._versions[row, : self.length[row]]

    def held_logprobs(self, row: int) -> np.ndarray:
        """float32[length] log-probabilities of a row that is not committed."""
        return self._logprobs[row, : self.length[row]]

    def limits(self, rows: np.ndarray) -> np.ndarray | int:
        """Positions at which the present turns of ``rows`` end at the latest: int32[n], or one for all."""
        return self.width if self.episodes is None else self.limit[rows]

    def newest_version(self, rows: np.ndarray) -> int:
        """The newest version of any token of ``rows``, which are not committed; -1 if the model has said none."""
        return int(self.newest_versions(rows).max(initial=-1))

    def newest_versions(self, rows: np.ndarray) -> np.ndarray:
        """int32[n] newest version in each of ``rows``, which are not committed; -1 where the model has said nothing."""
        if self.episodes is not None:
            return np.array([self.marks(row).max(initial=-1) for row in rows.tolist()], np.int32)
        length = self.length[rows]
        return np.where(length > 0, self._versions[rows, np.maximum(length - 1, 0)], -1)

    def enter_rewards(self, rows: np.ndarray, rewards: np.ndarray, parts: np.ndarray | None) -> None:
        """Score ``rows``.

        Raises:
            IllegalTransition: the rewards do not fit the rows; nothing has changed.
        """
        self.check_rewards(rows, rewards, parts)
        if parts is not None:
            if not self.reward_parts.shape[1]:
                self.reward_parts = np.full((len(self), parts.shape[1]), np.nan)
            self.reward_parts[rows] = parts
        self.reward[rows] = rewards
        self.state[rows] = SampleState.SCORED

    def check_rewards(self, rows: np.ndarray, rewards: np.ndarray, parts: np.ndarray | None) -> None:
        """Raises IllegalTransition unless there is a number for each of ``rows``, and for each part of it."""
        if len(rewards) != len(rows) or not np.isfinite(rewards).all():
            raise IllegalTransition(f"step {self.step}: a reward must be a finite number for each sample")
        if parts is None:
            return
        known = self.reward_parts.shape[1]
        if parts.ndim != 2 or len(parts) != len(rows) or parts.shape[1] != (known or parts.shape[1]):
            raise IllegalTransition(f"step {self.step}: {parts.shape} parts of rewards for {len(rows)} samples")
        if not np.isfinite(parts).all():
            raise IllegalTransition(f"step {self.step}: each part of a reward must be a finite number")

    def ended(self, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Which rows end in a stop token of the model's, and which others have reached their limit; bool[n] each.

        What an environment has written stops nothing.
        """
        length = self.length[rows]
        last = np.maximum(length - 1, 0)
        said = (length > 0) & (self._versions[rows, last] >= 0)
        stopped = said & np.isin(self._tokens[rows, last], self.stop_ids)
        return stopped, ~stopped & (length >= self.limits(rows))

    def ragged(self, rows: np.ndarray, *, routes: bool = False) -> Ragged:
        """The responses of ``rows``, copied; with their ``routes``, which are many times as large, if asked for."""
        if self._archive is not None:
            return _select(self._archive, rows, routes=routes)
        lengths = self.length[rows]
        width = int(lengths.max(initial=0))
        mask = np.arange(width) < lengths[:, None]
        return Ragged(
            rows,
            lengths,
            self._tokens[rows, :width][mask],
            self._logprobs[rows, :width][mask],
            self._versions[rows, :width][mask],
            self._routes[rows, :width][mask] if routes and self._routes is not None else None,
        )

    def archive(self) -> None:
        """Keep the responses end to end and give the matrices back; no token is added after a commit."""
        self._archive = self.ragged(np.arange(len(self), dtype=np.int32), routes=True)
        self._tokens = self._logprobs = self._versions = np.zeros((0, 0), np.int32)
        self._routes = None


def _check_limits(event: BatchIssued, limits: EpisodeLimits) -> None:
    if len(event.prompt_ids):
        raise IllegalTransition(
            f"step {event.step}: episodes have empty prompts, and these have {len(event.prompt_ids)}"
        )
    if min(limits.turns_max, limits.turn_tokens) < 1 or limits.episode_tokens < 2:
        raise IllegalTransition(f"step {event.step}: {limits} leave an episode no turn")


def _select(archive: Ragged, rows: np.ndarray, *, routes: bool) -> Ragged:
    """The entries of ``rows`` of an archive that holds every row in order."""
    ends = np.cumsum(archive.lengths)
    lengths = archive.lengths[rows]
    starts = ends[rows] - lengths
    at = ragged_positions(lengths) + np.repeat(starts, lengths)
    held = archive.routes[at] if routes and archive.routes is not None else None
    return Ragged(rows, lengths, archive.tokens[at], archive.logprobs[at], archive.versions[at], held)


@functools.cache
def one_of(*states: SampleState) -> np.ndarray:
    """bool[9] by state; ``one_of(...)[batch.state]`` costs a tenth of ``np.isin``."""
    table = np.zeros(len(SampleState), np.bool_)
    table[list(states)] = True
    table.flags.writeable = False
    return table


def ragged_positions(counts: np.ndarray) -> np.ndarray:
    """0..counts[0]-1, 0..counts[1]-1, … as int64[sum(counts)]."""
    return np.arange(int(counts.sum())) - np.repeat(np.cumsum(counts) - counts, counts)
