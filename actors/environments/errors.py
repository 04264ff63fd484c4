"""What can go wrong between a prompt and its reward.

HeadraceError
└── RewardError
    ├── SourceUnreadable   configuration: the data set cannot be read; names the file, row and field
    │   └── PromptRefused  the chat template or the tokenizer refuses one prompt; others may be fine
    ├── RowChanged         the data changed during the run; that sample has no result
    ├── ScorerBroken       the user's function raised; that sample has no result
    │   ├── NoNumber       it returned something that is not a number
    │   └── RewardRefused  no call of it could ever give a verdict; names file and line, and ends the run
    └── ScorerTimedOut     no verdict in time; that sample has no result, its process was killed
"""

from __future__ import annotations

from transport.errors import HeadraceError


class RewardError(HeadraceError):
    """A prompt could not be read or a response not be scored."""


class SourceUnreadable(RewardError):
    """The data set is missing or a row does not have what the job file says."""

    permanent = True


class PromptRefused(SourceUnreadable):
    """The chat template or the tokenizer refuses one prompt; the message is theirs."""


class RowChanged(RewardError):
    """The row has changed since its prompt was read: the response would be graded against another row's answer."""


class ScorerBroken(RewardError):
    """The verifier raised or died."""


class NoNumber(ScorerBroken):
    """The verifier returned something that is no number: a coroutine, a text, a map."""


class RewardRefused(ScorerBroken):
    """The verifier cannot be imported or called, or can only fail: mend it, and start again."""

    permanent = True


class ScorerTimedOut(RewardError):
    """The verifier gave no verdict within ``reward.timeout_s``."""
