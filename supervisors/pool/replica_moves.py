"""Keeps a trainer's ranks on other machines at the places chosen for them, and tells people where they are.

    nodes change ─▶ look ─┬─ a replica is to be elsewhere, and the trainer runs ─▶ it starts anew there, at no cost
                          └─ there is no node for one ─▶ told: a trainer that does not run waits for it
    the trainer has started ─▶ told with the nodes of its replicas ─▶ look

Invariants
- One move at a time. A trainer that is being started goes to the right places by itself (``Nodes.choose``).
- People are told once for each reason to wait.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING

from supervisors.pool.pool import PoolPart
from supervisors.pool.rollout_workers import News

if TYPE_CHECKING:
    from supervisors.machine.membership.nodes import Nodes
    from supervisors.tree.child_record import SupervisionEvent


class ReplicaMoves(PoolPart):
    """Starts the trainer of one job anew when a replica of it is to be on another node.

    Args:
        trainer: name of its process at node agents.
        runs: whether the trainer is ready.
        restart: ends the trainer in good order, and starts it again.
        now: the clock.
    """

    def __init__(
        self,
        nodes: Nodes,
        trainer: str,
        news: News,
        *,
        runs: Callable[[], bool],
        restart: Callable[[], Awaitable[None]],
        now: Callable[[], float],
    ) -> None:
        self._nodes, self._trainer, self._news = nodes, trainer, news
        self._runs, self._restart, self._now = runs, restart, now
        self._moving: asyncio.Task[None] | None = None
        self._feared = ""
        self._unsubscribe: Callable[[], None] = lambda: None
        self._waits_for = ""
        """Machine that a trainer that does not run waits for, in words; empty: for none."""
        self._waits_since_s = 0.0

    def trainer_waits(self) -> tuple[str, float]:
        return self._waits_for, self._now() - self._waits_since_s if self._waits_for else 0.0

    def starting(self) -> None:
        self._unsubscribe = self._nodes.subscribe(self.look)
        self.look()

    def stop(self) -> None:
        self._unsubscribe()
        if self._moving is not None:
            self._moving.cancel()

    def look(self) -> None:
        """React to a node that has come, gone or begun to drain, or to the trainer's end."""
        runs, wanted = self._runs(), self._nodes.replicas.wanted(self._trainer)
        self._tell(wanted, runs=runs)
        if runs and self._moving is None and self._nodes.replicas.astray(self._trainer):
            self._moving = asyncio.create_task(self._move(), name="move replicas of the trainer")

    def child_event(self, event: SupervisionEvent) -> None:
        """Tell where the replicas are, once the trainer has started; its ranks are ready, or about to be."""
        if event.kind not in ("started", "adopted") or event.child != "trainer":
            return
        nodes = self._nodes.replicas.nodes_of(self._trainer)
        self._news.record("replicas_placed", nodes=",".join(nodes))
        self._news.say(message=f"the trainer has {self._nodes.replicas.in_words(self._trainer)}, the others here")
        self.look()

    def _tell(self, wanted: str, *, runs: bool) -> None:
        waits_for = "" if runs else wanted
        if waits_for != self._waits_for:
            if not self._waits_for:
                self._waits_since_s = self._now()
            self._waits_for = waits_for
            self._news.say(waiting_for=waits_for)
        feared = wanted if runs else ""
        if feared and not self._feared:
            self._news.say(message=f"the trainer may soon have to wait for {feared}")
        self._feared = feared

    async def _move(self) -> None:
        try:
            places = self._nodes.replicas.in_words(self._trainer)
            self._news.say(message=f"the trainer starts anew, with {places}: a node is to go")
            await self._restart()
        except Exception as error:  # noqa: BLE001  nobody else waits for it
            self._news.say(message=f"the trainer could not be started anew: {type(error).__name__}: {error}")
        finally:
            self._moving = None
