"""A trainer whose replicas are on other machines follows their places, and people are told where it is.

    nodes change ─▶ look ─┬─ a replica is to be elsewhere, and the trainer runs ─▶ it starts anew there, at no cost
                          └─ there is no node for one ─▶ told: waited for by a trainer that does not run
    the trainer has started ─▶ told with the nodes of its replicas ─▶ look

Invariants
- One move at a time. A trainer that is being started goes to the right places by itself (``Nodes.choose``).
- Whoever waits is told once for each reason.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING

from supervisors.jobs.job_news import JobNews

if TYPE_CHECKING:
    from supervisors.machine.nodes import Nodes


class ReplicaMoves:
    """Belongs to one job. ``start`` it before the trainer, ``stop`` it before the trainer is stopped.

    Args:
        trainer: its process, as node agents call it.
        runs: whether it is ready.
        restart: ends it in good order, and starts it again.
        now: the clock.
    """

    def __init__(
        self,
        nodes: Nodes,
        trainer: str,
        news: JobNews,
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
        self.waits_for = ""
        """What a trainer that does not run waits for; empty: for no node."""
        self._waits_since_s = 0.0

    @property
    def waits_s(self) -> float:
        """For how long already."""
        return self._now() - self._waits_since_s if self.waits_for else 0.0

    def start(self) -> None:
        self._unsubscribe = self._nodes.subscribe(self.look)
        self.look()

    def stop(self) -> None:
        """Move nothing more."""
        self._unsubscribe()
        if self._moving is not None:
            self._moving.cancel()

    def look(self) -> None:
        """A node may have come, gone or begun to drain, or the trainer have ended."""
        runs, wanted = self._runs(), self._nodes.replicas.wanted(self._trainer)
        self._tell(wanted, runs=runs)
        if runs and self._moving is None and self._nodes.replicas.astray(self._trainer):
            self._moving = asyncio.create_task(self._move(), name="move replicas of the trainer")

    def trainer_started(self) -> None:
        """It is ready, with all of its ranks about to be."""
        nodes = self._nodes.replicas.nodes_of(self._trainer)
        self._news.record("replicas_placed", nodes=",".join(nodes))
        self._news.say(message=f"replicas of the trainer: 0 here, {_in_words(nodes)}")
        self.look()

    def _tell(self, wanted: str, *, runs: bool) -> None:
        waits_for = "" if runs else wanted
        if waits_for != self.waits_for:
            if not self.waits_for:
                self._waits_since_s = self._now()
            self.waits_for = waits_for
            self._news.say(waiting_for=waits_for)
        feared = wanted if runs else ""
        if feared and not self._feared:
            self._news.say(message=f"the trainer may soon have to wait for {feared}")
        self._feared = feared

    async def _move(self) -> None:
        try:
            nodes = self._nodes.replicas.nodes_of(self._trainer)
            self._news.say(message=f"the trainer starts anew, with replica {_in_words(nodes)}: a node is to go")
            await self._restart()
        except Exception as error:  # noqa: BLE001  nobody else waits for it
            self._news.say(message=f"the trainer could not be started anew: {type(error).__name__}: {error}")
        finally:
            self._moving = None


def _in_words(nodes: list[str]) -> str:
    """Replicas from 1 on, each with its node."""
    return ", ".join(f"{number} on {node}" for number, node in enumerate(nodes, 1))
