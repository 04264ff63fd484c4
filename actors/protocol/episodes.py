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
  and answered from the ledger afterwards; EpisodeEnded counts once, and with another reward it is refused.
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
    """Bounds each episode of a batch; ``SamplingParams.max_tokens`` bounds the model's tokens of all its turns."""

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
    """Number of the environment's life, from 1."""


class EpisodeWork(msgspec.Struct, frozen=True):
    """Describes one episode to drive."""

    name: EpisodeName
    context: bytes
    """Row of the data that describes the task, as the prompt source encoded it."""
    left_s: float
    """Seconds that the episode still has."""


@message("environments.begin_episodes")
class BeginEpisodes(Message):
    """The scheduler hands these episodes out. One that the worker drives already goes on."""

    job: str
    term: int
    episodes: list[EpisodeWork]


@message("environments.abandon_episodes")
class AbandonEpisodes(Message):
    """The scheduler gives these episodes up: their children are killed, and no EpisodeEnded is sent for them."""

    job: str
    term: int
    episodes: list[EpisodeName]


@message("scheduler.register_environment")
class RegisterEnvironment(Message):
    """An environment worker offers itself, or comes back after its scheduler's death. Reply: EnvironmentRegistered."""

    job: str
    worker: ActorAddress
    slots: int
    """Episodes that the worker drives at once."""
    running: list[EpisodeName]
    """Episodes that the worker drives now."""


@message("scheduler.environment_registered")
class EnvironmentRegistered(Message):
    term: int
    lease_s: float
    lease: int
    kept: list[EpisodeName]
    """Episodes of ``running`` with which the worker goes on; it kills the others."""


@message("scheduler.episode_ended")
class EpisodeEnded(Message):
    """The episode is over: it has a reward, or a failure and so no result. Reply: Acknowledged."""

    job: str
    episode: EpisodeName
    reward: float | None
    parts: tuple[float, ...] = ()
    """Rewards that ``reward`` is the weighted sum of; empty if there is only one."""
    failure: Failure | None = None
    cause: str = "ended"
    """Cause: ``ended``; the budget ``turns``, ``tokens``, ``context`` or ``time``, with a reward; ``failed``."""
    metrics: dict[str, float] = msgspec.field(default_factory=dict)
    """Numbers that the environment reports, averaged over a step."""


@message("scheduler.lease_episode")
class LeaseEpisode(Message):
    """An agent outside wants an episode to drive (``environment.kind: external``). Reply: EpisodeLeased."""

    job: str


@message("scheduler.episode_leased")
class EpisodeLeased(Message):
    work: EpisodeWork | None
    retry_after_s: float = 0.0
    """Seconds after which to ask again, if no episode may begin now."""


@message("scheduler.get_episode")
class GetEpisode(Message):
    """The gateway asks what the ledger holds of an episode. Reply: EpisodeRecord."""

    job: str
    episode: EpisodeName


@message("scheduler.episode_record")
class EpisodeRecord(Message):
    """Holds an episode as the ledger has it, up to the last whole turn, without tokens of a turn under way."""

    status: str
    """State: ``live``; ``ended``: it has a reward or was dropped; ``replaced``: another attempt has it; ``unknown``."""
    context: bytes = b""
    tokens: np.ndarray = msgspec.field(default_factory=lambda: np.empty(0, np.int32))  # int32[n]
    logprobs: np.ndarray = msgspec.field(default_factory=lambda: np.empty(0, np.float32))  # float32[n]
    versions: np.ndarray = msgspec.field(default_factory=lambda: np.empty(0, np.int32))  # int32[n], marks
    model_tokens_left: int = 0
    """Tokens that the model may still say in this episode."""
    tokens_left: int = 0
    """Tokens for which the row still has room."""
    turns_left: int = 0
    left_s: float = 0.0


@message("scheduler.take_turn")
class TakeTurn(Message):
    """The environment has spoken: append its tokens, and have the model take its turn. Reply: TurnTaken, at its end.

    Refused (NotAccepted) if it contradicts the ledger: ``offset`` is not where the row ends. Accepted even so are a
    repeat, which finds just these tokens there, and a turn that has ``diverged``.
    """

    job: str
    episode: EpisodeName
    offset: int
    """Position in the row of the first of ``tokens``."""
    fresh: bool
    """Whether ``tokens`` begin a fresh context; False: they go on behind the last turn."""
    tokens: np.ndarray  # int32[n], at least one
    turn_tokens: int
    """Tokens that the model may say in this turn, at most."""
    diverged: bool = False
    """Whether a replay differs from the earlier attempt: what stands from ``offset`` on is cut off first."""


@message("scheduler.turn_taken")
class TurnTaken(Message):
    """Tells that the model's turn is over, or that there was no budget for it and the episode is to end."""

    status: str
    """Result: ``taken``; ``spent``: no tokens or turns are left, and nothing was appended; ``ended``, ``replaced`` and
    ``unknown`` as in EpisodeRecord."""
    offset: int = 0
    """Position in the row of the first of ``tokens``."""
    tokens: np.ndarray = msgspec.field(default_factory=lambda: np.empty(0, np.int32))  # int32[n]
    logprobs: np.ndarray = msgspec.field(default_factory=lambda: np.empty(0, np.float32))  # float32[n]
    versions: np.ndarray = msgspec.field(default_factory=lambda: np.empty(0, np.int32))  # int32[n]
    finish: int = 0
    """Reason why the turn ended, a FinishReason."""


@message("scheduler.cut_turn")
class CutTurn(Message):
    """The last turn is cut (a stop string stood in it): the row ends at ``length``. Reply: Acknowledged."""

    job: str
    episode: EpisodeName
    length: int
