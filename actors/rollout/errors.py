"""What can go wrong in a rollout worker and its engine.

HeadraceError
├── TooManyEarlyCommands    the scheduler's bug: too many commands before its answer to the worker; the worker crashes
└── EngineError
    ├── EngineUnavailable   the machine's fault: a library or device is missing; a retry elsewhere is safe
    ├── ModelUnreadable     the job's fault: the checkpoint cannot be loaded; do not retry
    ├── WeightsMismatch     the publisher's fault: the tensors are not this model's; nothing was changed
    ├── LogitsNotFinite     the weights' fault: nothing can be sampled from them; the engine can load others
    ├── ServerGone          nobody's fault: a server of rollout.servers is away or has ended; its worker waits for it
    ├── ServerRefuses       the server's fault: it answers with an error; safe elsewhere
    └── RequestRefused      the data's fault: this prompt cannot be processed, others can
"""

from __future__ import annotations

from transport.errors import HeadraceError


class TooManyEarlyCommands(HeadraceError):
    """More than ``limits.early_commands`` commands came before the scheduler's answer to a worker's offer."""

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
    """The checkpoint cannot be loaded as a causal language model, or this engine cannot run it."""

    permanent = True


class WeightsMismatch(EngineError):
    """Names, shapes or dtypes are not the model's. The engine still serves the version that it served before."""


class LogitsNotFinite(EngineError):
    """Weights give logits that are no numbers. ``requests`` names the running ones that are concerned.

    Once those are aborted the engine can go on: nothing of the others is lost.
    """

    def __init__(self, message: str, requests: tuple[int, ...] = ()) -> None:
        super().__init__(message)
        self.requests = requests


class ServerGone(EngineError):
    """A ``vllm serve`` process of ``rollout.servers`` has ended, is silent, or was started again with other weights."""

    blameless = True


class ServerRefuses(EngineError):
    """A server answers with an error. ``status``: of HTTP."""

    def __init__(self, url: str, path: str, status: int, text: str) -> None:
        super().__init__(f"the server at {url} answers {path} with {status}: {text.strip()[:300] or 'no text'}")
        self.status = status


class RequestRefused(EngineError):
    """One request is unusable, such as a token id outside the vocabulary. ``requests`` names the culprits."""

    def __init__(self, message: str, requests: tuple[int, ...]) -> None:
        super().__init__(message)
        self.requests = requests
