"""What can go wrong between a prompt and its reward.

HeadraceError
└── RewardError
    ├── SourceUnreadable   configuration: the data set cannot be read; names the file, row and field
    │   └── PromptRefused  the chat template or the tokenizer refuses one prompt; others may be fine
    ├── RowChanged         the data were changed in mid-run; that sample has no result
    ├── ScorerBroken       the user's function raised; that sample has no result
    │   ├── NoNumber       it returned what no sample could have as its reward
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
    """The row that a response answers is not what it was: an answer of another one would be compared with it."""


class ScorerBroken(RewardError):
    """The verifier raised or died."""


class NoNumber(ScorerBroken):
    """The verifier returned something that is no number: a coroutine, a text, a map."""


class RewardRefused(ScorerBroken):
    """The verifier cannot be imported or called, or can only fail: mend it, and start again."""

    permanent = True


class ScorerTimedOut(RewardError):
    """The verifier gave no verdict within ``reward.timeout_s``."""
