"""What can go wrong in a training service besides what its backends raise.

HeadraceError
├── CallOutOfOrder   our bug at the trainer: a call's number is neither the last one nor the next
├── NotYours         a process spoke for another job than its own; refused, and nothing was done
└── NoSlice          the limit of the wait was reached while others computed; a retry may have more luck

Where state lies has errors of its own (``residency_errors.py``). ``BundleLost`` and ``ServiceRefuses``, which a trainer
must know, stand in ``actors/trainer/errors.py``.
"""

from __future__ import annotations

from actors.core.errors import ReplyError
from transport.errors import HeadraceError


class CallOutOfOrder(ReplyError):
    """A call came whose number is neither the last one nor the next. The trainer's bug; nothing was computed."""


class NotYours(ReplyError):
    """A process spoke for a job that it does not serve."""


class NoSlice(HeadraceError):
    """A call waited for its slice as long as it may."""
