"""What can go wrong in an episode, as its child process sees it.

HeadraceError
└── EpisodeError
    ├── EnvironmentRefused  configuration: the environment cannot be imported, made or reached at all; ends the run
    ├── EnvironmentBroken   the user's code returned what no environment may return; the episode has no result
    ├── BudgetSpent         turns, tokens or seconds are over; the episode ends gracefully, and is scored as it is
    ├── SessionOver         another attempt drives the episode by now, or nobody wants it any more
    ├── GatewayAway         infrastructure: the gateway did not answer within the episode's time; begun again
    ├── ToolServerDied      infrastructure; if it happens again, the model is told of it instead
    ├── ToolFailed          a tool server says that a call went wrong; the model reads what the server says
    └── GatewayRefused      the request can never be answered; the message is the gateway's
        └── ContextFull     the messages are longer than the model's context

ToolTimedOut                a call took longer than environment.tool_s; the model is told of it
"""

from __future__ import annotations

from transport.errors import HeadraceError


class EpisodeError(HeadraceError):
    """An episode could not go on."""


class EnvironmentRefused(EpisodeError):
    """The environment can never work as the job file says: mend it, and start again."""

    permanent = True


class EnvironmentBroken(EpisodeError):
    """The environment returned what it may not return: a reward that is no number, say."""


class BudgetSpent(EpisodeError):
    """A budget has nothing left for a further turn; ``budget`` says which: turns, tokens, context or time."""

    def __init__(self, budget: str) -> None:
        super().__init__(f"the episode has no {budget} left (budget_spent)")
        self.budget = budget


class SessionOver(EpisodeError):
    """The session key belongs to an episode, or to an attempt at it, that is over."""


class GatewayAway(EpisodeError):
    """The gateway was not reached within the episode's time."""


class GatewayRefused(EpisodeError):
    """The gateway refuses the request because of its content."""


class ContextFull(GatewayRefused):
    """The messages are longer than the model's context."""


class ToolServerDied(EpisodeError):
    """A tool server has ended, or no longer takes requests."""


class ToolFailed(EpisodeError):
    """A tool server says that a call went wrong."""


class ToolTimedOut(BaseException):
    """A call of a tool took too long. The base class keeps an ``except Exception`` in the tool from catching it."""
