"""Sessions: client programs, alive while they send heartbeats.

    begin ─▶ alive ──no heartbeat for tinker_session_s, or finish──▶ ended: its models and sampling sessions end too

Invariants
- A session belongs to one tenant. To any other it does not exist.
- Silence is counted from the server's own start at the earliest: while the server was away no client could be heard.
"""

from __future__ import annotations

import asyncio
from typing import Any

from actors.tinker.errors import Problem
from actors.tinker.operation_log import OperationLog, SessionRow
from configs.limits import Limits


class Sessions:
    """Knows the sessions that are alive, and when each was heard last."""

    def __init__(self, log: OperationLog, limits: Limits) -> None:
        self._log, self._limits = log, limits
        self._rows: dict[str, SessionRow] = {}
        self._heard_s: dict[str, float] = {}
        self._beginning: dict[str, int] = {}

    async def open(self) -> None:
        """Take up the sessions of the server's former lives."""
        for row in await self._log.sessions():
            self._rows[row.id] = row
            self._heard_s[row.id] = asyncio.get_running_loop().time()

    async def begin(self, tenant: str, metadata: dict[str, Any]) -> str:
        """The id of a new session.

        Raises:
            Problem: the tenant has too many.
        """
        alive = sum(row.tenant == tenant for row in self._rows.values()) + self._beginning.get(tenant, 0)
        if alive >= self._limits.tinker_sessions:
            text = f"{alive} sessions of yours are alive: end one, or wait until one was silent for long"
            raise Problem(429, text, retry_after_s=self._limits.tinker_look_s)
        self._beginning[tenant] = self._beginning.get(tenant, 0) + 1
        try:
            row = await self._log.begin_session(tenant, metadata)
        finally:
            self._beginning[tenant] -= 1
        self._rows[row.id] = row
        self._heard_s[row.id] = asyncio.get_running_loop().time()
        return row.id

    async def require(self, tenant: str, session: str) -> SessionRow:
        """The session, which is heard by this.

        Raises:
            Problem: the tenant has no such session, or it has ended.
        """
        row = self._rows.get(session)
        if row is None or row.tenant != tenant:
            row = await self._log.session(session)
            if row is None or row.tenant != tenant:
                raise Problem(404, f"session_id: there is no session {session[:200]!r} of yours: create one")
            raise Problem(410, f"session_id: {session} has ended: create a new one, and load what you saved")
        self._heard_s[session] = asyncio.get_running_loop().time()
        return row

    def alive(self) -> list[SessionRow]:
        return list(self._rows.values())

    def silent(self) -> list[str]:
        """Sessions that have been silent for too long."""
        since_s = asyncio.get_running_loop().time() - self._limits.tinker_session_s
        return [session for session, heard_s in self._heard_s.items() if heard_s < since_s]

    def forget(self, session: str) -> None:
        self._rows.pop(session, None)
        self._heard_s.pop(session, None)
