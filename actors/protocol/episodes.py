"""Episodes: samples whose environment speaks between the model's turns, and who says what to whom about them.

    scheduler ──BeginEpisodes, AbandonEpisodes──▶ environment worker ──starts a child──▶ HTTP to the gateway
    environment worker ──RegisterEnvironment, EpisodeEnded──▶ scheduler
    gateway ──GetEpisode, TakeTurn, CutTurn──▶ scheduler
    gateway ──LeaseEpisode, EpisodeEnded──▶ scheduler, for agents outside

Invariants
- An episode is a sample: (step, prompt, sibling). ``attempt`` counts the lives of its environment, from 1; what is said
  in the name of an older attempt changes nothing.
- Its row in the ledger is append-only, but for cuts, which are events and are counted. ``versions`` marks each token:
  ≥ 0 the policy version that sampled it; ENVIRONMENT a token of the environment; FRESH the first one of a fresh
  context. The row of an episode begins with FRESH: its prompt is empty, and the first context says what is asked.
- Every question here may be repeated: TakeTurn at one offset with the same tokens is one turn, joined while it runs,
  and answered from the ledger afterwards; EpisodeEnded counts once.
"""

from __future__ import annotations

from typing import Final

import msgspec
import numpy as np

from actors.core.message import Message, message
from actors.protocol.failures import Failure
from transport.address import ActorAddress

ENVIRONMENT: Final = -1
"""Mark of a token that the environment has written, in place of a policy version."""
FRESH: Final = -2
"""Mark of the first token of a fresh context, which the environment has written too."""


class EpisodeLimits(msgspec.Struct, frozen=True, array_like=True):
    """They bound each episode of a batch; ``SamplingParams.max_tokens`` bounds the model's tokens of all its turns."""

    turns_max: int
    turn_tokens: int
    """Tokens that the model may say in a turn, at most."""
    episode_tokens: int
    """Tokens of a row, at most: of model and environment, in all contexts."""


class EpisodeName(msgspec.Struct, frozen=True, array_like=True):
    step: int
    prompt: int
    sibling: int
    attempt: int
    """Life of its environment, from 1."""


class EpisodeWork(msgspec.Struct, frozen=True):
    """It is one episode to drive."""

    name: EpisodeName
    context: bytes
    """Context as the prompt source wrote it: it says which row of the data the task is."""
    left_s: float
    """Seconds within which it should have ended."""


@message("environments.begin_episodes")
class BeginEpisodes(Message):
    """The scheduler has these driven. An episode that the worker drives already goes on."""

    job: str
    term: int
    episodes: list[EpisodeWork]


@message("environments.abandon_episodes")
class AbandonEpisodes(Message):
    """Nobody wants these any more: their children are killed, and nothing is said of them."""

    job: str
    term: int
    episodes: list[EpisodeName]


@message("scheduler.register_environment")
class RegisterEnvironment(Message):
    """An environment worker offers itself, or comes back after its scheduler's death. Reply: EnvironmentRegistered."""

    job: str
    worker: ActorAddress
    slots: int
    """Episodes that it drives at once."""
    running: list[EpisodeName]
    """Episodes that it drives now."""


@message("scheduler.environment_registered")
class EnvironmentRegistered(Message):
    term: int
    lease_s: float
    lease: int
    kept: list[EpisodeName]
    """Those of ``running`` with which it is to go on; it kills the others."""


@message("scheduler.episode_ended")
class EpisodeEnded(Message):
    """The episode is over: it has a reward, or a failure and so no result. Reply: Acknowledged."""

    job: str
    episode: EpisodeName
    reward: float | None
    parts: tuple[float, ...] = ()
    """Rewards that it is the weighted sum of; none where there is one only."""
    failure: Failure | None = None
    cause: str = "ended"
    """What ended it: ``ended``, ``turns``, ``tokens``, ``time`` (budgets, with a reward all the same), ``failed``."""
    metrics: dict[str, float] = msgspec.field(default_factory=dict)
    """Numbers of the environment's own, averaged over a step."""


@message("scheduler.lease_episode")
class LeaseEpisode(Message):
    """An agent outside wants an episode to drive (``environment.kind: external``). Reply: EpisodeLeased."""

    job: str


@message("scheduler.episode_leased")
class EpisodeLeased(Message):
    work: EpisodeWork | None
    retry_after_s: float = 0.0
    """Seconds after which to ask again, where none may be begun now."""


@message("scheduler.get_episode")
class GetEpisode(Message):
    """What the ledger holds of this episode. Reply: EpisodeRecord."""

    job: str
    episode: EpisodeName


@message("scheduler.episode_record")
class EpisodeRecord(Message):
    """An episode as the ledger has it, up to the last whole turn; tokens of a turn under way are not in it."""

    status: str
    """``live``; ``ended``: it has a reward, or was dropped; ``replaced``: another attempt drives it; ``unknown``."""
    context: bytes = b""
    tokens: np.ndarray = msgspec.field(default_factory=lambda: np.empty(0, np.int32))  # int32[n]
    logprobs: np.ndarray = msgspec.field(default_factory=lambda: np.empty(0, np.float32))  # float32[n]
    versions: np.ndarray = msgspec.field(default_factory=lambda: np.empty(0, np.int32))  # int32[n], marks
    model_tokens_left: int = 0
    """Tokens that the model may still say in this episode."""
    tokens_left: int = 0
    """Tokens for which its row has room."""
    turns_left: int = 0
    left_s: float = 0.0


@message("scheduler.take_turn")
class TakeTurn(Message):
    """The environment has spoken: append its tokens, and have the model take its turn. Reply: TurnTaken, at its end.

    Refused (NotAccepted) if it contradicts the ledger: ``offset`` is not where the row ends, unless the row holds just
    this there, or ``diverged`` is set.
    """

    job: str
    episode: EpisodeName
    offset: int
    """Position in the row of the first of ``tokens``."""
    fresh: bool
    """Whether they begin a fresh context; False: they go on behind the last turn."""
    tokens: np.ndarray  # int32[n], at least one
    turn_tokens: int
    """Tokens that the model may say in this turn, at most."""
    diverged: bool = False
    """Whether a replay has left the path of the earlier attempt: what stands from ``offset`` on is cut off first."""


@message("scheduler.turn_taken")
class TurnTaken(Message):
    """The model's turn is over; or there was no budget for it, and the episode is to end."""

    status: str
    """``taken``; ``spent``: no tokens or turns are left, and nothing was appended; ``ended``, ``replaced``, ``unknown``
    as in EpisodeRecord."""
    offset: int = 0
    """Position in the row of the first of ``tokens``."""
    tokens: np.ndarray = msgspec.field(default_factory=lambda: np.empty(0, np.int32))  # int32[n]
    logprobs: np.ndarray = msgspec.field(default_factory=lambda: np.empty(0, np.float32))  # float32[n]
    versions: np.ndarray = msgspec.field(default_factory=lambda: np.empty(0, np.int32))  # int32[n]
    finish: int = 0
    """FinishReason of the turn."""


@message("scheduler.cut_turn")
class CutTurn(Message):
    """The last turn is cut (a stop string stood in it): the row ends at ``length``. Reply: Acknowledged."""

    job: str
    episode: EpisodeName
    length: int
