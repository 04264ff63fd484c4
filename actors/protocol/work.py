"""What a rollout worker hears, and the plain data that engines and the wire share.

scheduler ──Assign, Revoke, PullVersion, SetAsleep, ReportsTaken, Drain──▶ worker      supervisor ──Drain──▶ worker
"""

from __future__ import annotations

import msgspec
import numpy as np

from actors.core.message import Message, message
from transport.address import ActorAddress


class SamplingParams(msgspec.Struct, frozen=True):
    """Says how tokens are drawn. A token's noise is a function of (seed, prompt, sibling, position) alone."""

    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    """Number of likeliest tokens to draw from; 0: no limit."""
    stop_token_ids: tuple[int, ...] = ()
    seed: int = 0
    """Seed of the job."""


class EngineStats(msgspec.Struct, frozen=True):
    """Holds gauges of an engine after a step; ``*_total`` only grow within one incarnation."""

    running: int = 0
    queued: int = 0
    kv_used_fraction: float = 0.0
    step_s: float = 0.0
    busy_s_total: float = 0.0
    idle_s_total: float = 0.0
    tokens_total: int = 0
    prefilled_tokens_total: int = 0
    """Tokens computed as a sequence began, or began again: those of its prompt, and of what it had said before."""
    prefix_hit_tokens_total: int = 0
    """Tokens of such sequences that needed no computing, since the prefix cache had them."""
    preemptions_total: int = 0
    """Times that a running sequence was set aside, to be computed again later, since the KV cache was full."""


class SampleWork(msgspec.Struct, frozen=True):
    """Holds one sample to go on with. ``generated`` are the response tokens that the ledger already has.

    Of an episode the model gets the present context: the prompt is what the environment wrote first, and ``generated``
    is what model and environment have said since.
    """

    assignment: int
    """Number of this hand-out; a sample that moves gets a new one."""
    sibling: int
    generated: np.ndarray  # int32[k]
    first: int = 0
    """Position, in the sample's row, of the first token of the response; above 0 in later contexts of an episode."""
    limit: int = 0
    """Position at which the turn of an episode ends; 0: no episode, so ``SamplingParams.max_tokens`` counts."""


class PromptWork(msgspec.Struct, frozen=True):
    """Holds one prompt with those of its siblings that this worker gets; the prompt is prefilled once."""

    step: int
    prompt: int
    prompt_ids: np.ndarray  # int32[p]
    samples: list[SampleWork]


@message("rollout.assign")
class Assign(Message):
    job: str
    term: int
    min_policy_version: int
    """Version below which a worker refuses the work."""
    sampling: SamplingParams
    work: list[PromptWork]


@message("rollout.revoke")
class Revoke(Message):
    """The worker is to stop these: it reports their last tokens, then each ends with FinishReason.ABORTED."""

    job: str
    term: int
    assignments: np.ndarray  # int64[n]


@message("rollout.pull_version")
class PullVersion(Message):
    """A newer version can be pulled from ``weights``: pull, verify, load between engine steps, say WorkerVersion."""

    job: str
    term: int
    policy_version: int
    weights: ActorAddress


@message("rollout.set_asleep")
class SetAsleep(Message):
    """The engine is to sleep as soon as it has nothing to do, or to wake. WorkerAsleep tells when it has done so."""

    job: str
    term: int
    asleep: bool


@message("rollout.reports_taken")
class ReportsTaken(Message):
    """The ledger has all reports of the worker up to this one; it may send more."""

    job: str
    term: int
    sequence: int


@message("rollout.drain")
class Drain(Message):
    """The worker takes no more work, hands back what runs, says Leaving and stops, all within ``deadline_s``."""

    job: str
    deadline_s: float
    reason: str
    notice: bool = False
    """Whether what runs goes on until the scheduler takes it back or the deadline is near; False: it stops at once."""
