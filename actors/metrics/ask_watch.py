"""Asks of this process that should have ended and have not, as fields of events; nothing is recorded for one that ends.

An ask is told of when two looks in a row find it past its deadline: if the loop is late, one look alone may run before
the timer that ends the ask.
"""

from __future__ import annotations

from actors.core.context import Context

Fields = dict[str, float | int | str]


class AskWatch:
    """Watches the asks of one process. ``overdue`` is to be called now and then, ``counted`` at the end."""

    def __init__(self, ctx: Context) -> None:
        self._ctx = ctx
        self._suspects: set[int] = set()
        self._told: set[int] = set()

    @property
    def _process(self) -> str:
        return self._ctx.self_address.peer.name

    def overdue(self) -> list[Fields]:
        """Fields of ``ask_overdue`` for each ask that is to be told of now; each is told of once."""
        late = {ask.request_id: ask for ask in self._ctx.asks().overdue}
        news = [ask for number, ask in late.items() if number in self._suspects and number not in self._told]
        self._suspects = set(late)
        self._told = (self._told & set(late)) | {ask.request_id for ask in news}
        return [
            {
                "process": self._process,
                "asker": ask.asker,
                "target": str(ask.target),
                "question": ask.question,
                "overdue_s": round(ask.overdue_s, 3),
            }
            for ask in news
        ]

    def counted(self) -> Fields:
        """Fields of ``asks_counted``, counted since the process began."""
        counts = self._ctx.asks()
        incarnation = f"{self._ctx.self_address.peer.incarnation:x}"
        return {
            "process": self._process,
            "incarnation": incarnation,
            "opened": counts.opened,
            "ended": counts.ended,
            "open": counts.open,
        }
