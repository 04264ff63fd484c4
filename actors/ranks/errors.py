"""What can go wrong between the ranks of a group.

HeadraceError
├── RankLost      a rank failed, vanished or differs from the others: the group starts anew; a retry is safe
├── LeaderLost    no leader came to a follower, or its leader is gone: the group starts anew; a retry is safe
└── NotItsTurn    our bug at a leader: an order of another leader, or out of turn; nothing was done
"""

from __future__ import annotations

from actors.core.errors import ReplyError
from transport.errors import HeadraceError


class RankLost(HeadraceError):
    """A rank of the group failed, vanished, or does not do what the others do. What was under way is void."""


class LeaderLost(HeadraceError):
    """A follower has no leader: none has come, or it is gone for longer than its supervisor needs to end the group."""


class NotItsTurn(ReplyError):
    """An order came from somebody who does not lead this rank, or not in turn. Nothing was done."""
