"""The events that can happen to samples: the ledger folds them, the journal keeps them.

Invariants
- An event is immutable and complete: folding the same events in the same order gives the same ledger.
- Rows name samples inside one step: ``row = (index of the prompt in its batch) * group_size + sibling``.
- An encoded event is plain MessagePack; an array is Ext 2 with ``[dtype, shape, bytes]``, as on the wire.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, cast

import msgspec
import numpy as np

from actors.protocol.episodes import EpisodeLimits
from actors.protocol.work import SamplingParams

_ARRAY_EXT = 2
_DTYPES = frozenset({"|u1", "<i4", "<i8", "<f4", "<f8"})


class Opened(msgspec.Struct, frozen=True, tag="opened"):
    """A scheduler has begun, under a new term: assigned samples are queued again, granted ones are scored again."""

    term: int = msgspec.field(name="epoch")  # the field's name since journals of 0.1


class BatchIssued(msgspec.Struct, frozen=True, tag="batch_issued"):
    """The prompts of a step have come. ``prompt_ids`` is ragged: prompt i owns the next ``prompt_lengths[i]`` ids."""

    step: int
    group_size: int
    sampling: SamplingParams
    prompts: np.ndarray  # int64[P], strictly increasing
    prompt_lengths: np.ndarray  # int32[P]
    prompt_ids: np.ndarray  # int32[sum(prompt_lengths)]
    contexts: list[bytes]
    episodes: EpisodeLimits | None = None
    """Bounds of the episodes, if each sample is one; None: each prompt is answered once."""


class BatchExtended(msgspec.Struct, frozen=True, tag="batch_extended"):
    """Further prompts of a step have come, with the group size and sampling of the first ones, whose rows stay."""

    step: int
    prompts: np.ndarray  # int64[P], strictly increasing
    prompt_lengths: np.ndarray  # int32[P]
    prompt_ids: np.ndarray  # int32[sum(prompt_lengths)]
    contexts: list[bytes]


class Assigned(msgspec.Struct, frozen=True, tag="assigned"):
    """``rows[i]`` of ``step`` is handed out under assignment number ``first + i``.

    ``workers[w]`` gets the next ``counts[w]`` of them.
    """

    step: int
    first: int
    workers: list[str]
    counts: np.ndarray  # int32[w]
    rows: np.ndarray  # int32[sum(counts)]
    again: bool = False
    """Whether the workers had these rows from a former life of the scheduler, and go on with them."""

    @classmethod
    def to_one(cls, worker: str, step: int, first: int, rows: np.ndarray, *, again: bool = False) -> Assigned:
        """Hand all rows to one worker."""
        return cls(step, first, [worker], np.array([len(rows)], np.int32), rows, again)


class TokensAppended(msgspec.Struct, frozen=True, tag="tokens_appended"):
    """Reports have come. Their columns are those of ``TokenReport``, end to end in the order of arrival.

    Report i is of ``workers[i]`` and ``versions[i]`` and owns the next ``row_counts[i]`` rows; row r owns the next
    ``counts[r]`` tokens. Rows that do not fit are ignored and counted, as if each report had come alone.
    """

    workers: list[str]
    versions: np.ndarray  # int32[d]
    row_counts: np.ndarray  # int32[d]
    assignments: np.ndarray  # int64[n]
    offsets: np.ndarray  # int32[n]
    counts: np.ndarray  # int32[n]
    finished: np.ndarray  # uint8[n]
    tokens: np.ndarray  # int32[sum(counts)]
    logprobs: np.ndarray  # float32[sum(counts)]
    routes: np.ndarray | None = None  # uint8[sum(counts), bytes]
    """Experts that predicted each token (``actors/models/routers.py``); 0: not known. None: of no token."""

    @classmethod
    def one(
        cls, worker: str, policy_version: int, assignments: np.ndarray, offsets: np.ndarray, counts: np.ndarray,
        finished: np.ndarray, tokens: np.ndarray, logprobs: np.ndarray, routes: np.ndarray | None = None,
    ) -> TokensAppended:  # fmt: skip
        """A single report."""
        versions, row_counts = np.array([policy_version], np.int32), np.array([len(assignments)], np.int32)
        return cls([worker], versions, row_counts, assignments, offsets, counts, finished, tokens, logprobs, routes)

    def split(self) -> list[TokensAppended]:
        """One event for each report."""
        if len(self.workers) == 1:
            return [self]
        parts: list[TokensAppended] = []
        first = at = 0
        for worker, version, n in zip(self.workers, self.versions.tolist(), self.row_counts.tolist(), strict=True):
            rows = slice(first, first + n)
            total = int(self.counts[rows].sum())
            entries = slice(at, at + total)
            parts.append(
                TokensAppended.one(
                    worker, version, self.assignments[rows], self.offsets[rows], self.counts[rows],
                    self.finished[rows], self.tokens[entries], self.logprobs[entries],
                    None if self.routes is None else self.routes[entries],
                )
            )  # fmt: skip
            first, at = first + n, at + total
        return parts


class Returned(msgspec.Struct, frozen=True, tag="returned"):
    """Hand-outs were broken off (worker lost, drained, revoked). A sample is finished if its tokens already end it."""

    worker: str
    assignments: np.ndarray  # int64[n]
    reason: str
    blame: bool = False
    """Whether the samples themselves may be at fault: their failures are counted then."""
    crashed: bool = False
    """Whether the worker crashed while it held these: one of them may be what crashes engines."""


class Suspected(msgspec.Struct, frozen=True, tag="suspected"):
    """News that an engine crashed while it held these samples, which have been returned already.

    ``rows[i]`` is one of step ``steps[i]``.
    """

    worker: str
    steps: np.ndarray  # int32[n]
    rows: np.ndarray  # int32[n]


class Scored(msgspec.Struct, frozen=True, tag="scored"):
    step: int
    rows: np.ndarray  # int32[n]
    rewards: np.ndarray  # float64[n]
    parts: np.ndarray | None = None  # float64[n, k]
    """Rewards whose weighted sum is the sample's entry of ``rewards``; None if there is only one."""


class EpisodesBegun(msgspec.Struct, frozen=True, tag="episodes_begun"):
    """A life of the environment of each of these rows begins: the first one, or one more after another was lost."""

    step: int
    rows: np.ndarray  # int32[n]


class Turned(msgspec.Struct, frozen=True, tag="turned"):
    """The environments of these rows have spoken; the model is to take its turn, up to position ``limits[i]``.

    Row i gets the next ``counts[i]`` tokens, from ``offsets[i]`` on, where it ends.
    """

    step: int
    rows: np.ndarray  # int32[n]
    offsets: np.ndarray  # int32[n]
    fresh: np.ndarray  # uint8[n]
    """Whether these tokens begin a fresh context."""
    counts: np.ndarray  # int32[n], at least 1
    tokens: np.ndarray  # int32[sum(counts)]
    limits: np.ndarray  # int32[n]


class EpisodeCut(msgspec.Struct, frozen=True, tag="episode_cut"):
    """Row i is cut off at ``lengths[i]``, and a turn under way is over; the environments go on."""

    step: int
    rows: np.ndarray  # int32[n]
    lengths: np.ndarray  # int32[n]


class EpisodesEnded(msgspec.Struct, frozen=True, tag="episodes_ended"):
    """Episodes are over, with rewards. A turn under way is over too."""

    step: int
    rows: np.ndarray  # int32[n]
    rewards: np.ndarray  # float64[n]
    parts: np.ndarray | None = None  # float64[n, k]
    """Parts of the rewards, as in ``Scored``."""
    cause: str = ""
    """Cause as in ``EpisodeEnded``; empty in older journals."""
    keeps_turn: bool = False
    """Whether what the model has said in a turn under way belongs to its answer; older journals cut it off."""


class Dropped(msgspec.Struct, frozen=True, tag="dropped"):
    step: int
    rows: np.ndarray  # int32[n]
    reason: str


class Granted(msgspec.Struct, frozen=True, tag="leased"):
    """Samples were sent to the trainer. ``replay``: the rows were committed before and stay so."""

    step: int
    rows: np.ndarray  # int32[n]
    replay: bool = False


class Committed(msgspec.Struct, frozen=True, tag="committed"):
    """The optimizer has stepped on exactly these samples."""

    step: int
    prompts: np.ndarray  # int64[n]
    siblings: np.ndarray  # int32[n]
    policy_version: int


class Checkpointed(msgspec.Struct, frozen=True, tag="checkpointed"):
    """Training can go on at ``step`` from the checkpoint at ``path``."""

    step: int
    path: str
    counters: dict[str, int] = {}
    """Counters of the ledger at that time, by name."""
    final: bool = False
    """Whether the checkpoint is the last one: the trainer was told to stop."""


class Paused(msgspec.Struct, frozen=True, tag="paused"):
    """The operator has stopped the hand-outs, or lets them go on."""

    paused: bool


class Stopping(msgspec.Struct, frozen=True, tag="stopping"):
    """The operator wants the step under way to be the last; False: a resumed run goes on beyond that step."""

    stopping: bool


class WindowLearned(msgspec.Struct, frozen=True, tag="window_learned"):
    """Holds what ``policies/seeding/offload.py`` knows of the seeding window after a step; the newest event counts."""

    step: int
    seed_s: float
    target: int
    memory: dict[int, float]


class Evaluated(msgspec.Struct, frozen=True, tag="evaluated"):
    """Every sample of an evaluation is scored or dropped, and these are its figures; the batch is not kept."""

    step: int
    """Step of the evaluation's batch, which stands for the version (``actors/protocol/evaluations.py``)."""
    figures: dict[str, float]
    """Figures by name; empty: the prompts could not be read."""


class Rewound(msgspec.Struct, frozen=True, tag="rewound"):
    """The trainer goes on at ``step``: grants are void, and committed steps from there on are replayed."""

    step: int


Event = (
    Opened
    | BatchIssued
    | BatchExtended
    | Assigned
    | TokensAppended
    | Returned
    | Suspected
    | Scored
    | EpisodesBegun
    | Turned
    | EpisodeCut
    | EpisodesEnded
    | Dropped
    | Granted
    | Committed
    | Checkpointed
    | Paused
    | Stopping
    | WindowLearned
    | Evaluated
    | Rewound
)


class _InlineArray(msgspec.Struct, array_like=True):
    dtype: str
    shape: list[int]
    data: bytes


_plain = msgspec.msgpack.Encoder()
_inline = msgspec.msgpack.Decoder(_InlineArray)


def _encode_array(item: object) -> msgspec.msgpack.Ext:
    if not isinstance(item, np.ndarray):
        raise TypeError(f"an event holds a {type(item).__name__}: only plain values and numpy arrays are kept")
    array = cast("np.ndarray[Any, Any]", item)
    return msgspec.msgpack.Ext(
        _ARRAY_EXT, _plain.encode(_InlineArray(array.dtype.str, list(array.shape), array.tobytes()))
    )


def _decode_array(code: int, data: memoryview) -> object:
    if code != _ARRAY_EXT:
        raise ValueError(f"unknown extension {code}")
    inline = _inline.decode(data)
    if inline.dtype not in _DTYPES or math.prod(inline.shape) * np.dtype(inline.dtype).itemsize != len(inline.data):
        raise ValueError(f"an array of {inline.dtype} {inline.shape} does not fit {len(inline.data)} bytes")
    return np.frombuffer(inline.data, dtype=inline.dtype).reshape(inline.shape)


def _check_array(kind: type, value: object) -> object:
    if isinstance(value, np.ndarray):
        return cast("np.ndarray[Any, Any]", value)
    raise ValueError(f"expected {kind.__name__}, got {type(value).__name__}")


_encoder = msgspec.msgpack.Encoder(enc_hook=_encode_array)
_decoder: msgspec.msgpack.Decoder[Event] = msgspec.msgpack.Decoder(
    Event, ext_hook=_decode_array, dec_hook=cast("Callable[[type, Any], Any]", _check_array)
)


def encode_event(event: Event) -> bytes:
    return _encoder.encode(event)


def decode_event(body: bytes) -> Event:
    """Raises msgspec.DecodeError or ValueError for bytes that are no event."""
    try:
        return _decoder.decode(body)
    except RecursionError as error:
        raise ValueError(f"nested too deeply for an event: {error}") from error


def kind_of(event: Event) -> str:
    """The event's tag, such as ``tokens_appended``."""
    return cast("str", event.__struct_config__.tag)
