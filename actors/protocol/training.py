"""What a job's trainer and a training service say to each other, and what a train backend gets and returns.

trainer ──AttachBundle──▶ service ──BundleAttached(life)──▶ trainer          head ──QueryService──▶ service
        ──TrainCall(life, 1)──▶ … the slice comes, the call is computed … ──TrainAnswer(1)──▶
        ──TrainCall(life, 2)──▶ …
        ──StepsCommitted──▶  ──DetachBundle(life)──▶

Always true
- A *bundle* is the trained state of one job: weights, optimizer, step count, gradient sums. A *life* of it begins with
  AttachBundle and ends with its trainer's life, with its service's, or with a call that breaks it.
- Calls of one life are numbered from 1 without a gap, and there is one at a time. A call that repeats the last number
  gets the same answer again, or joins the call that is still under way: nothing is computed twice. A gap is refused,
  and a call that names another life is answered with BundleLost.
- The answer is sent when the call is done. Waiting for the slice and computing have a limit each.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Final

import msgspec
import numpy as np

from actors.core.message import Message, message
from actors.protocol.weights import Manifest
from configs.learning_schema import Correction, KlKind, Surrogate
from transport.address import ActorAddress

# ------------------------------------------------------------ what a backend is given and gives back


@dataclass(frozen=True, kw_only=True, slots=True)
class MicroBatch:
    """Holds padded sequences for one forward and backward pass: B sequences, T positions (prompt and response).

    Position t holds the token; ``loss_weight[b, t]`` weighs the loss of *predicting* the token at t and is 0 on
    the prompt, on padding, and where nothing is to be learned. Prompt first, response after it, padding last.
    """

    input_ids: np.ndarray  # int32[B, T]
    lengths: np.ndarray  # int32[B], tokens before padding
    prompt_lengths: np.ndarray  # int32[B]
    behaviour_logprobs: np.ndarray  # float32[B, T], of the engine that generated, 0 where loss_weight is 0
    advantages: np.ndarray  # float32[B, T]
    loss_weight: np.ndarray  # float32[B, T]
    reference_logprobs: np.ndarray | None = None  # float32[B, T]
    old_logprobs: np.ndarray | None = None
    """float32[B, T] of the trainer, under the weights before the step; None: a step of one update."""
    stale: np.ndarray | None = None
    """bool[B, T], whether an older version than the one being trained has generated the token; None: all are stale."""
    old_values: np.ndarray | None = None
    """float32[B, T], what the critic expected before the step; None, like ``returns``, without a critic."""
    returns: np.ndarray | None = None
    """float32[B, T], what the critic is to expect."""
    targets: np.ndarray | None = None
    """int32[B, T], the token at t whose log-probability is asked for and learned from, predicted from the inputs before
    t; it may be any token. None: the inputs themselves."""
    ratio_mask: np.ndarray | None = None
    """float32[B, T], not 0 at the tokens whose mean is a sequence's ratio (``explicit_losses.gspo``); None: at all."""
    routes: np.ndarray | None = None
    """uint8[B, T, bytes]: experts that predicted the token at t (``actors/models/routers.py``); 0: the router chooses.
    None: it chooses everywhere."""

    @property
    def older_rows(self) -> np.ndarray:
        """bool[B], whether an older version than the one being trained has generated any token of the row.

        What it generated stays in the engine's cache, so the row's other tokens are not wholly the new version's.
        """
        return np.ones(len(self.lengths), np.bool_) if self.stale is None else np.logical_or.reduce(self.stale, axis=1)


@dataclass(frozen=True, kw_only=True, slots=True)
class LossSpec:
    """Defines the policy loss, all of it (``losses.py`` gives the formulas and their sources)."""

    surrogate: Surrogate = "clipped"
    clip_low: float = 0.2
    clip_high: float = 0.2
    correction: Correction = "tis"
    """Treatment of the ratio of the trainer's probabilities to the engine's."""
    importance_cap: float = 2.0
    """Upper bound of that ratio."""
    importance_floor: float = 0.5
    """Lower bound of that ratio, for ``icepop``."""
    kl_coefficient: float = 0.0
    kl_kind: KlKind = "k3"
    kl_unbiased: bool = False
    entropy_coefficient: float = 0.0
    load_balancing: float | None = None
    """Weight of the experts' load-balancing loss, a token's share of it; 0: measured only; None: not even that."""
    temperature: float = 1.0
    """Sampling temperature: the trainer's log-probabilities are of the same distribution."""
    value_clip: float = 0.0
    """Distance from its old value beyond which a value is not pushed further; 0: no limit."""
    function: str = ""
    """Function in place of the surrogate, as ``package.module:function`` or a name in ``explicit_losses.py``; empty:
    none."""
    parameters: dict[str, float] = field(default_factory=dict)
    """Parameters of a loss in ``explicit_losses.py``, by their names there."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MicroBatchStats:
    """Holds sums over the tokens whose weight is not 0, so that they add up over micro-batches and ranks.

    ``loss_sum`` is weighted; the other sums are plain, to be divided by ``tokens``. ``accumulate`` returns those that
    are known before a device has computed anything, and ``step`` the others, with 0 in place of what the other tells.
    """

    tokens: int
    weight: float
    loss_sum: float
    clipped_sum: float
    kl_sum: float
    entropy_sum: float
    mismatch_sum: float
    """Sum of |trainer - engine log-probability|, of all tokens."""
    cut_sum: float = 0.0
    """Number of tokens whose weight the correction lowered, or that it dropped."""
    value_loss_sum: float = 0.0
    """Weighted sum of the critic's loss; this and the next are 0 without a critic."""
    value_clipped_sum: float = 0.0
    older_tokens: int = 0
    """Number of tokens in ``MicroBatch.older_rows``, where staleness adds to the distance from the engine."""
    older_mismatch_sum: float = 0.0
    """The part of ``mismatch_sum`` that belongs to them."""
    imbalance_sum: float = 0.0
    """How unevenly experts are used, 1 if all alike, times the tokens; 0: not measured."""


NO_STATS: Final = MicroBatchStats(
    tokens=0, weight=0.0, loss_sum=0.0, clipped_sum=0.0, kl_sum=0.0, entropy_sum=0.0, mismatch_sum=0.0
)
"""Statistics of no tokens at all."""


def summed(parts: list[MicroBatchStats]) -> MicroBatchStats:
    """Statistics of all parts together."""
    names = [field.name for field in dataclasses.fields(MicroBatchStats)]
    return MicroBatchStats(**{name: sum(getattr(part, name) for part in parts) for name in names})


@dataclass(frozen=True, kw_only=True, slots=True)
class StepResult:
    grad_norm: float
    learning_rate: float
    skipped: bool
    """Whether the step was not taken, as its gradient was not finite."""
    critic_grad_norm: float | None = None
    """Norm of the critic's gradient; None: there is no critic."""
    stats: MicroBatchStats = NO_STATS
    """What the device has summed up since the last step."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Learned:
    """Holds what a backend answers about one micro-batch's targets, under the weights that it had."""

    logprobs: np.ndarray  # float32[B, T], of each target; 0 where no response token stands
    loss_sum: float
    """Sum over tokens of weight times loss."""


@dataclass(frozen=True, kw_only=True, slots=True)
class AdamStep:
    """Holds all hyper-parameters of one step of AdamW. Matrices decay, vectors do not."""

    learning_rate: float
    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8
    weight_decay: float = 0.0
    max_grad_norm: float = 0.0
    """Norm to which a longer gradient is shortened; 0: it is left as it is."""

    def scale(self, norm: float) -> float:
        """Factor of a gradient of that norm."""
        return min(1.0, self.max_grad_norm / (norm + 1e-6)) if self.max_grad_norm > 0 else 1.0


@dataclass(frozen=True, kw_only=True, slots=True)
class StoredBytes:
    """Holds the sizes of what a backend writes, in bytes, so that room is checked before it is needed."""

    segment: int
    checkpoint: int
    """Size of weights, optimizer and the exported model together; what is small beside them is left out."""


# ------------------------------------------------------------ what a call asks for, and what comes of it


class ScoreCall(msgspec.Struct, frozen=True, tag="score"):
    """Compute the log-probabilities of the tokens. Outcome: TokensScored."""

    batch: MicroBatch
    temperature: float
    reference: bool


class ValuesCall(msgspec.Struct, frozen=True, tag="values"):
    """Compute what the critic expects before each token. Outcome: Valued."""

    batch: MicroBatch


class AccumulateCall(msgspec.Struct, frozen=True, tag="accumulate"):
    """Add to the gradient sums. Outcome: Accumulated."""

    batch: MicroBatch
    loss: LossSpec


class LearnCall(msgspec.Struct, frozen=True, tag="learn"):
    """Add to the gradient sums if ``backward``, and tell the targets' log-probabilities. Outcome: TargetsLearned."""

    batch: MicroBatch
    loss: LossSpec
    backward: bool


class DropSums(msgspec.Struct, frozen=True, tag="drop_sums"):
    """Forget the gradients since the last step, after a call that found no memory. Outcome: Finished."""


class StepCall(msgspec.Struct, frozen=True, tag="step"):
    """Update the weights. Outcome: Stepped."""

    weight: float
    adam: AdamStep | None = None
    """Hyper-parameters of this step; None: those of the spec."""


class ExportSegment(msgspec.Struct, frozen=True, tag="export_segment"):
    """Lay the weights out in the file ``path``, on the machine of both, and end the burst. Outcome: Exported."""

    path: str
    policy_version: int
    chunk_bytes: int
    job: str
    """Name for the manifest."""


class SaveCall(msgspec.Struct, frozen=True, tag="save"):
    """Write weights and optimizer. Outcome: Finished."""

    directory: str


class LoadCall(msgspec.Struct, frozen=True, tag="load"):
    """Read what SaveCall wrote. Outcome: Finished."""

    directory: str
    optimizer: bool = True
    """Whether the optimizer's state is read as well; else it begins anew."""


class ExportCheckpoint(msgspec.Struct, frozen=True, tag="export_checkpoint"):
    """Write the model for other programs. Outcome: Finished."""

    directory: str


TrainBody = (
    ScoreCall
    | ValuesCall
    | AccumulateCall
    | LearnCall
    | DropSums
    | StepCall
    | ExportSegment
    | SaveCall
    | LoadCall
    | ExportCheckpoint
)


class TokensScored(msgspec.Struct, frozen=True, tag="scored"):
    logprobs: np.ndarray  # float32[B, T]


class Valued(msgspec.Struct, frozen=True, tag="valued"):
    values: np.ndarray  # float32[B, T]


class Accumulated(msgspec.Struct, frozen=True, tag="accumulated"):
    stats: MicroBatchStats


class TargetsLearned(msgspec.Struct, frozen=True, tag="learned"):
    learned: Learned


class Stepped(msgspec.Struct, frozen=True, tag="stepped"):
    result: StepResult


class Exported(msgspec.Struct, frozen=True, tag="exported"):
    manifest: Manifest


class Finished(msgspec.Struct, frozen=True, tag="finished"):
    """Tells that the call is done, and nothing else."""


class CallFailed(msgspec.Struct, frozen=True, tag="failed"):
    """Tells that the backend has raised: name of the error's class, its text, and the errno of an OSError."""

    error: str
    text: str
    errno: int | None = None
    breaks: bool = False
    """Whether the error ended the bundle's life: its state may be half changed."""


TrainOutcome = TokensScored | Valued | Accumulated | TargetsLearned | Stepped | Exported | Finished | CallFailed


class CallTimes(msgspec.Struct, frozen=True, array_like=True):
    """Holds the times that one call has taken, in seconds, without the way there and back."""

    waited_s: float = 0.0
    """Time until the slice came."""
    switch_s: float = 0.0
    """Time in which the bundle's state was brought into the device's memory."""
    compute_s: float = 0.0

    def metrics(self) -> dict[str, float]:
        """Columns in the step's row of a job that shares its trainer."""
        return {"service_wait_s": self.waited_s, "switch_s": self.switch_s, "compute_s": self.compute_s}

    def plus(self, others: CallTimes) -> CallTimes:
        """The sums of these times and ``others``."""
        return CallTimes(
            self.waited_s + others.waited_s, self.switch_s + others.switch_s, self.compute_s + others.compute_s
        )


# ------------------------------------------------------------ messages


@message("training.attach")
class AttachBundle(Message):
    """A trainer asks to be served. Reply: BundleAttached, the same one if this life of the trainer asks again.

    A new life of the job's trainer ends the earlier life of the bundle.
    """

    job: str
    trainer: ActorAddress
    host: str
    """The trainer's machine (``actors/weights/segments.py::host_id``): files are exchanged by their paths."""
    run: str
    """Id of the run (``actors/weights/segments.py::run_id``); state that was kept for another run is of no use."""
    backend: str
    """Kind of backend, as ``trainer.backend``."""
    spec: str
    """BackendSpec as JSON; threads of 0 and a device of ``auto`` leave it to the service."""
    wait_s: float
    """Limit of the wait for a slice in which the bundle is made; ``limit_s`` limits the making itself."""
    limit_s: float
    checkpoint_step: int = 0
    """Number of steps in the trainer's newest checkpoint; the service's kept state is of use only if it has more."""
    priority: int = 0
    share: float = 1.0
    ranks: int = 1
    """Ranks that share its state, as ``trainer.ranks``."""


@message("training.attached")
class BundleAttached(Message):
    """Tells that the bundle is there, with the model's weights or a kept state; or by ``failure`` why it is not."""

    life: str
    stored: StoredBytes | None = None
    resumed_step: int | None = None
    """Number of steps, all committed, in the kept state that the bundle has; None: the service had kept none, and the
    trainer loads its checkpoint."""
    failure: CallFailed | None = None


@message("training.call")
class TrainCall(Message):
    """A trainer has something computed. Reply: TrainAnswer, or a refusal that says why nothing was computed."""

    job: str
    life: str
    number: int
    body: TrainBody
    wait_s: float
    """Limit of the wait for the slice; ``limit_s`` limits the computing."""
    limit_s: float


@message("training.answer")
class TrainAnswer(Message):
    number: int
    outcome: TrainOutcome
    times: CallTimes = CallTimes()


@message("training.committed")
class StepsCommitted(Message):
    """A trainer says that so many steps of its job are committed: no later life may go on from more steps."""

    job: str
    life: str
    steps: int


@message("training.detach")
class DetachBundle(Message):
    """A trainer goes, or the head says that a job is over. Reply: core's Done."""

    job: str
    life: str = ""
    """Life of the bundle that is meant; empty: any."""
    keep: bool = False
    """Whether the next life of the trainer is to find the last state that was stored."""


@message("training.query_service")
class QueryService(Message):
    """The head asks for the state of the service. Reply: ServiceState."""


class BundleState(msgspec.Struct, frozen=True, kw_only=True):
    """Describes one job's bundle, for people and for placement."""

    job: str
    tier: str
    """Place of its state: ``memory``, ``host``, ``disk``; empty: there is none yet."""
    state_bytes: int
    bursts: int
    """Number of bursts that held a step and have ended."""
    asking_s: float | None
    """Time for which a call of the bundle has waited; None: none waits."""
    waited_s: float
    """Sum over all calls so far, as are the next two; see CallTimes."""
    switch_s: float
    compute_s: float
    isolated: bool
    """Whether no other bundle is kept in memory beside this one: the service has died in its calls."""


@message("training.service_state")
class ServiceState(Message):
    name: str
    holder: str
    """Job whose burst goes on; empty: none does."""
    up_s: float
    """Time since the service began, of which it computed for ``compute_s`` and switched for ``switch_s``."""
    compute_s: float
    switch_s: float
    memory_bytes: int
    """Bytes of state in memory now."""
    bundles: list[BundleState]
    isolated: list[str]
    """Jobs that compute alone since the service has died in their calls, also those that are not attached now."""
