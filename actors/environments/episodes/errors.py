"""What can go wrong in an episode, as its child process sees it.

HeadraceError
└── EpisodeError
    ├── EnvironmentRefused  configuration: it cannot be imported, made or reached at all; ends the run
    ├── EnvironmentBroken   the user's code gave what no environment may give; the episode has no result
    ├── BudgetSpent         turns, tokens or seconds are over; the episode ends gracefully, and is scored as it is
    ├── SessionOver         another attempt drives the episode by now, or nobody wants it any more
    ├── GatewayAway         infrastructure: the gateway did not answer for as long as there was time; begun again
    ├── ToolServerDied      infrastructure, unless it happens again: then the model reads of it
    ├── ToolFailed          a tool server says that a call went wrong; the model reads what it says
    └── GatewayRefused      the request cannot be answered, however often it is asked; the message is the gateway's
        └── ContextFull     its messages are more than the model's context holds

ToolTimedOut                a call took longer than environment.tool_s; the model reads of it
"""

from __future__ import annotations

from transport.errors import HeadraceError


class EpisodeError(HeadraceError):
    """An episode could not go on as it was."""


class EnvironmentRefused(EpisodeError):
    """The environment can never work as the job file says: mend it, and start again."""

    permanent = True


class EnvironmentBroken(EpisodeError):
    """The environment returned what it may not return: a reward that is no number, say."""


class BudgetSpent(EpisodeError):
    """There are no turns, tokens or seconds left for a further turn; ``budget`` says of which."""

    def __init__(self, budget: str) -> None:
        super().__init__(f"the episode has no {budget} left (budget_spent)")
        self.budget = budget


class SessionOver(EpisodeError):
    """The session key is of an episode, or of an attempt at it, that is over."""


class GatewayAway(EpisodeError):
    """The gateway was not reached within the episode's time."""


class GatewayRefused(EpisodeError):
    """The gateway refuses the request for what stands in it."""


class ContextFull(GatewayRefused):
    """The messages are longer than the model's context."""


class ToolServerDied(EpisodeError):
    """A tool server has ended, or no longer takes what it is asked."""


class ToolFailed(EpisodeError):
    """A tool server says that a call went wrong."""


class ToolTimedOut(BaseException):
    """A call of a tool took too long. It is no Exception: no ``except Exception`` of a tool's author is to stop it."""
