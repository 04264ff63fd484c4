"""What can go wrong between a prompt and its reward.

HeadraceError
└── RewardError
    ├── SourceUnreadable   configuration: the data set cannot be read; names the file, row and field
    ├── RowChanged         the data were changed in mid-run; that sample has no result
    ├── ScorerBroken       the user's function raised; that sample has no result
    └── ScorerTimedOut     no verdict in time; that sample has no result, its process was killed
"""

from __future__ import annotations

from transport.errors import HeadraceError


class RewardError(HeadraceError):
    """A prompt could not be read or a response not be scored."""


class SourceUnreadable(RewardError):
    """The data set is missing or a row does not have what the job file says."""

    permanent = True


class RowChanged(RewardError):
    """The row that a response answers is not what it was: an answer of another one would be compared with it."""


class ScorerBroken(RewardError):
    """The verifier raised or died."""


class ScorerTimedOut(RewardError):
    """The verifier gave no verdict within ``reward.timeout_s``."""
