"""Errors of supervision. Continues the tree of ``transport/errors.py``.

HeadraceError
└── SupervisionError
    ├── ChildStartFailed     the child's fault, or its machine's; the supervisor retries within its budget
    ├── SupervisorGaveUp     a child is in a crash loop, or met a permanent error; do not retry before that is mended
    ├── HeadGaveUp           the head could not be started, or ended too often; read its log, then resume the run
    ├── NoNode               no machine to start a process on; start one and retry
    ├── NoSuchDevices        --devices asks for what this machine does not have; the text says what it has
    ├── NeverServed          no training service can ever serve the job; the text says what it needs and what there is
    ├── ServiceGone          a training service was given up or removed; mend it, then resume its jobs
    ├── ServiceNotReady      a training service is not ready yet; the caller tries again
    ├── DirectoryInUse       another run lives in that run directory; choose another one, or end that run
    ├── ProviderError        a provider cannot bring up that machine; another machine may do
    ├── HeadLost             a node's head does not answer any more; join again when it is back
    ├── ModelNotMade         the tiny model could not be made on the spot; the message has the last log lines
    ├── ModelNotFetched      a hub name led to no model; the message says what was tried, and what to do before a retry
    ├── RewardModelNotMade   a reward model could not be trained before the run; the message says what to mend
    ├── DataNotFetched       a hub name led to no data set; the message says what was tried and what to do
    └── ModelTextUnusable    the model's tokenizer or its positions do not fit the job; do not retry

ReplyError (actors/core/errors.py)
├── NodeRefused              a machine may not join as it is: its name is malformed or taken, or its numbers are wrong
├── NotYourNode              a machine used the name of another one; the text says which
└── FaultNotPossible         a fault is not possible in this run, or not where it was requested; the text says why
"""

from __future__ import annotations

from actors.core.errors import ReplyError
from actors.core.reason import Reason
from supervisors.tree.restart_budget import ExitCause
from transport.errors import HeadraceError


class SupervisionError(HeadraceError):
    """Base of the errors of supervision."""


class ChildStartFailed(SupervisionError):
    """A child did not become ready. ``reason`` is the error it named; ``log_tail`` is the end of ``log_path``.

    ``node`` is set if the node is to blame, not the child: its agent gave no answer.
    """

    def __init__(
        self,
        child: str,
        cause: ExitCause,
        detail: str,
        log_tail: tuple[str, ...] = (),
        log_path: str = "",
        *,
        node: str = "",
        reason: Reason | None = None,
    ) -> None:
        if reason is not None:
            what = f"{reason} (all of it: {log_path})" if log_path else str(reason)
        elif log_tail:
            what = "\n".join((f"{detail}\n--- last lines of {log_path}", *log_tail))
        else:
            what = detail
        super().__init__(f"{child} did not start: {what}")
        self.child = child
        self.cause = cause
        self.detail = detail
        self.log_tail = log_tail
        self.log_path = log_path
        self.node = node
        self.reason = reason


class SupervisorGaveUp(SupervisionError):
    """The restart budget is spent, a child never became ready, or met a permanent error. All children are stopped."""


class HeadGaveUp(SupervisionError):
    """The head could not be kept alive; its log says why. ``headrace run --resume`` goes on once that is mended."""


class NoNode(SupervisionError):
    """There is no machine of the wanted kind to start a process on. Retry when one has joined."""


class NoSuchDevices(SupervisionError):
    """``--devices`` asks for what this machine does not have, or cannot be read. A retry needs another value."""

    permanent = True


class NeverServed(SupervisionError):
    """A job needs more of a training service than any will ever have. Change the job, or the service."""

    permanent = True


class ServiceGone(SupervisionError):
    """A job's training service was given up or removed. The job can be resumed when it is there again."""

    permanent = True


class ServiceNotReady(SupervisionError):
    """A training service is being started. That is no fault of its callers, which try again."""


class DirectoryInUse(SupervisionError):
    """A run directory belongs to a live run, whose process the message names. Nothing in it was touched."""

    permanent = True


class ProviderError(SupervisionError):
    """A provider could not bring up the requested machine. Request another one."""


class ModelNotMade(SupervisionError):
    """The process that makes the tiny model failed or ran out of time."""


class ModelNotFetched(SupervisionError):
    """The job's model could not be fetched from its hub: no hub, no such model, no access, no room."""


class RewardModelNotMade(SupervisionError):
    """The reward model of ``reward.train`` could not be trained: its preferences, its settings or its process."""

    permanent = True


class DataNotFetched(SupervisionError):
    """The data set of ``data.path`` could not be fetched from its hub: no hub, no such set or split, no access."""

    permanent = True


class ModelTextUnusable(SupervisionError):
    """The files of the model do not allow the job's prompts or responses: the message names field or file, and why."""

    permanent = True


class HeadLost(SupervisionError):
    """A node has not reached its head for longer than it may wait."""


class FaultNotPossible(ReplyError):
    """A fault cannot be injected here; the text says why. The caller decides what to do."""


class NodeRefused(ReplyError):
    """A head does not admit a machine; the text says what to change before another try."""

    permanent = True


class NotYourNode(ReplyError):
    """A machine tried to join or to leave in another machine's name."""

    permanent = True
