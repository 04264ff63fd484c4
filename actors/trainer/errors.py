"""Errors of training.

HeadraceError
└── TrainerError
    ├── BadGrant             the scheduler's bug: a group whose columns do not fit together; do not retry
    ├── BadMicroBatch        our bug: arrays whose shapes do not fit together; do not retry
    ├── CallRefused          a training call that cannot be computed as asked; nothing was changed; do not retry
    ├── MicroBatchTooLarge   configuration: a rank's part does not fit into a message; do not retry
    ├── OutOfMemory          a micro-batch found no memory; the gradient sums are void, and smaller ones may fit
    ├── SampleTooLarge       configuration: one sample alone finds no memory; do not retry
    ├── ModelNotLoadable     configuration: the model directory cannot be read; do not retry
    ├── CheckpointCorrupt    a file is missing or altered; name another checkpoint, do not retry
    ├── CannotMerge          an adapter or its model is missing, altered, or of another kind; name others
    ├── CheckpointAstray     checkpoints and journal are of different times; put one back, do not retry
    ├── GrantChanged         a restarted scheduler grants other tokens than were trained; start from a checkpoint
    ├── EngineDisagrees      the engine samples another policy than is trained; try another engine, do not retry
    ├── OwnFunctionFailed    a loss or advantage of the user's own raised, or returned nonsense; do not retry
    ├── TrainingDiverged     non-finite gradients step after step; do not retry
    ├── BackendClosed        our bug: a call outside start … close
    ├── StateParked          our bug: a call on a backend while its state is parked; restore it first
    ├── ParkedStateDamaged   parked state that was altered, or is another model's; start from a checkpoint
    ├── BundleLost           infrastructure: the training service has lost our state; start from the newest step
    ├── ServiceRefuses       configuration: this service can never train this job; do not retry
    ├── ServiceBusy          a training service had no slice, or no room, within the wait; a retry may help
    └── ServiceFailed        a training service's backend has raised an error unknown here
"""

from __future__ import annotations

from pathlib import Path

from actors.core.errors import ReplyError
from configs.run_files import CHECKPOINTS
from transport.errors import HeadraceError


class TrainerError(HeadraceError):
    """Base of the trainer's own errors."""


class BadGrant(TrainerError):
    """A granted group whose columns contradict each other. The scheduler's bug; retrying cannot help."""


class BadMicroBatch(TrainerError):
    """A micro-batch whose arrays contradict each other. Our bug; retrying cannot help."""


class CallRefused(TrainerError):
    """A training call whose data, loss or hyper-parameters cannot be computed. Nothing was changed.

    The caller's fault; the message names what is wrong, and what was expected. Retrying cannot help.
    """

    permanent = True


class MicroBatchTooLarge(TrainerError):
    """A rank's part of a micro-batch is larger than a message may be. The message says which key to lower."""

    permanent = True


class OutOfMemory(TrainerError):
    """A micro-batch did not fit into the device's memory. The gradient sums are void: drop them, and repeat the step.

    Infrastructure. The trainer repeats the step's work in smaller micro-batches.
    """


class SampleTooLarge(TrainerError):
    """One sample, alone in its micro-batch, does not fit into the device's memory. The message says what to do."""

    permanent = True


class ModelNotLoadable(TrainerError):
    """The model directory does not hold what is needed. Configuration; retrying cannot help."""

    permanent = True


class CheckpointCorrupt(TrainerError):
    """A checkpoint that is not whole. The message names the file; retrying cannot help, another checkpoint can."""

    permanent = True


class CannotMerge(TrainerError):
    """No whole model can be made of an adapter. The message says what is missing; retrying cannot help."""

    permanent = True


class CheckpointAstray(TrainerError):
    """The newest checkpoint and the run's journal do not belong together: one of them was removed or put back."""

    permanent = True

    def __init__(self, run_dir: Path, step: int, why: str) -> None:
        found = f"the newest checkpoint is of step {step}" if step else "there is no checkpoint"
        super().__init__(
            f"{run_dir / CHECKPOINTS}: {found}, and the journal says: {why}. Put back checkpoints and journal.db of "
            "the same time, or begin a new run, with a checkpoint as its model.path"
        )


class GrantChanged(TrainerError):
    """A trained group was granted again with other samples; the step is void, start from the newest checkpoint.

    The scheduler was killed before its journal had the samples, and their next draw came out differently.
    """


class EngineDisagrees(TrainerError):
    """Engine and trainer are further apart on the same tokens than rounding explains. Retrying cannot help."""

    permanent = True


class OwnFunctionFailed(TrainerError):
    """A function that the job file names cannot be imported, raised, or returned no valid loss or advantage.

    The user's fault; the message says where in their code. Retrying cannot help.
    """

    permanent = True


class TrainingDiverged(TrainerError):
    """Gradients stayed non-finite. The user's hyper-parameters or a bug; retrying cannot help."""

    permanent = True


class BackendClosed(TrainerError):
    """A backend was called before ``start`` or after ``close``. Our bug."""


class StateParked(TrainerError):
    """A backend was called while its state is parked. Our bug."""


class ParkedStateDamaged(TrainerError):
    """Parked state does not fit its hashes, or belongs to another model. It is not used; resume from a checkpoint."""


class BundleLost(TrainerError, ReplyError):
    """The training service lacks this life of the bundle: the service was restarted, or another trainer attached.

    Infrastructure. The trainer did nothing wrong; its next life goes on from the job's newest step.
    """

    blameless = True


class ServiceRefuses(TrainerError, ReplyError):
    """A training service can never train this job; the message says which key is in the way."""

    permanent = True


class ServiceBusy(TrainerError, ReplyError):
    """The training service had no slice, or no room, for as long as the trainer may wait. Retrying may help."""


class ServiceFailed(TrainerError):
    """The backend in the training service has raised; the message begins with the class of the error."""
