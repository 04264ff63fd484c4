"""What a rollout worker hears, and the plain data that engines and the wire share."""

from __future__ import annotations

import msgspec
import numpy as np

from actors.core.message import Message, message
from transport.address import ActorAddress


class SamplingParams(msgspec.Struct, frozen=True):
    """How tokens are drawn. The noise of a token is a function of (seed, prompt, sibling, position) alone."""

    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    """0: no limit."""
    stop_token_ids: tuple[int, ...] = ()
    seed: int = 0
    """The job's seed."""


class EngineStats(msgspec.Struct, frozen=True):
    """An engine's gauges after a step; ``*_total`` only grow within one incarnation."""

    running: int = 0
    queued: int = 0
    kv_used_fraction: float = 0.0
    step_s: float = 0.0
    busy_s_total: float = 0.0
    idle_s_total: float = 0.0
    tokens_total: int = 0


class SampleWork(msgspec.Struct, frozen=True):
    """One sample to go on with. ``generated`` holds the response tokens that the ledger already has."""

    assignment: int
    """Unique per hand-out; a sample that moves gets a new one."""
    sibling: int
    generated: np.ndarray  # int32[k]


class PromptWork(msgspec.Struct, frozen=True):
    """One prompt and those of its siblings that this worker gets; the prompt's prefix is computed once."""

    step: int
    prompt: int
    prompt_ids: np.ndarray  # int32[p]
    samples: list[SampleWork]


@message("rollout.assign")
class Assign(Message):
    job: str
    epoch: int
    min_policy_version: int
    """Refused by a worker that holds an older version."""
    sampling: SamplingParams
    work: list[PromptWork]


@message("rollout.revoke")
class Revoke(Message):
    """Stop these; tokens already produced are delivered, then each ends with FinishReason.ABORTED."""

    job: str
    epoch: int
    assignments: np.ndarray  # int64[n]


@message("rollout.pull_version")
class PullVersion(Message):
    """A newer version is to be had from ``weights``; pull, verify, load between engine steps, say WorkerVersion."""

    job: str
    epoch: int
    policy_version: int
    weights: ActorAddress


@message("rollout.set_asleep")
class SetAsleep(Message):
    """Let the engine sleep, as soon as it has nothing to do, or wake it. Told with WorkerAsleep once it is so."""

    job: str
    epoch: int
    asleep: bool


@message("rollout.deltas_taken")
class DeltasTaken(Message):
    """The ledger has what the worker has said up to this delta; it may say more."""

    job: str
    epoch: int
    sequence: int


@message("rollout.drain")
class Drain(Message):
    """Take no more work, hand back what runs, say Leaving, stop; all within ``deadline_s``."""

    job: str
    deadline_s: float
    reason: str
    notice: bool = False
    """What runs goes on meanwhile, until the scheduler takes it back or the deadline is near; False: no token more."""
