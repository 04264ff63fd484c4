"""What can go wrong between the ranks of a group.

HeadraceError
├── RankLost      a rank failed, vanished or differs from the others: the group starts anew; a retry is safe
├── LeaderLost    no leader came to a follower, or its leader is gone: the group starts anew; a retry is safe
├── StreamsEnded  another rank's stream has ended, or says nothing: in torch DistNetworkError, and RankLost follows
└── NotItsTurn    a bug in the leader: an order from another leader, or out of turn; nothing was done
"""

from __future__ import annotations

from actors.core.errors import ReplyError
from transport.errors import HeadraceError


class RankLost(HeadraceError):
    """A rank of the group failed, vanished, or does not do what the others do. The call under way is void."""


class LeaderLost(HeadraceError):
    """A follower has no leader: none has come, or it has been gone longer than a supervisor needs to end the group."""


class StreamsEnded(HeadraceError):
    """Another rank has ended its stream, or says nothing. The exchange under way is void, and so is the group."""


class NotItsTurn(ReplyError):
    """An order came from an actor that does not lead this rank, or came out of turn. Nothing was done."""
