"""What can go wrong in a rollout worker and its engine.

HeadraceError
├── TooManyEarlyCommands    the scheduler's bug: it commands a worker that it has not answered; the worker crashes
└── EngineError
    ├── EngineUnavailable   the machine's fault: a library or device is missing; a retry elsewhere is safe
    ├── ModelUnreadable     the job's fault: the checkpoint cannot be loaded; do not retry
    ├── WeightsMismatch     the publisher's fault: the tensors are not this model's; nothing was changed
    └── RequestRefused      the prompt's fault (data): this request cannot be processed, others can
"""

from __future__ import annotations

from transport.errors import HeadraceError


class TooManyEarlyCommands(HeadraceError):
    """More commands than ``early_commands`` came before the answer to a worker's offer."""

    def __init__(self, waiting: int) -> None:
        super().__init__(
            f"{waiting} commands wait for the scheduler's answer to this worker's offer, and one more has come. "
            "Expected at most limits.early_commands. Give up this life: its samples go on elsewhere"
        )


class EngineError(HeadraceError):
    """Something in a rollout engine failed."""


class EngineUnavailable(EngineError):
    """A library or device that the engine needs is missing; the message says which and how to get it."""


class ModelUnreadable(EngineError):
    """The checkpoint directory cannot be loaded as a causal language model, or not be run by this engine."""

    permanent = True


class WeightsMismatch(EngineError):
    """Names, shapes or dtypes are not the model's. The engine still serves the version that it served before."""


class RequestRefused(EngineError):
    """One request is unusable, such as a token id outside the vocabulary. ``requests`` names the culprits."""

    def __init__(self, message: str, requests: tuple[int, ...]) -> None:
        super().__init__(message)
        self.requests = requests
