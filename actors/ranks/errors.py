"""What can go wrong between the ranks of a group.

HeadraceError
└── RankLost    a rank failed, vanished or differs from the others: the group starts anew; a retry is safe
"""

from __future__ import annotations

from transport.errors import HeadraceError


class RankLost(HeadraceError):
    """A rank of the group failed, vanished, or does not do what the others do. What was under way is void."""
