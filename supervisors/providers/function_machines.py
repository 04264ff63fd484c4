"""Machines of functions: there is one for each function in the head's book, and none besides.

    head ──the book, whole──▶ follow ─┬─ in it, and new ─▶ provider.start ─▶ it joins the head
                                      └─ no longer in it ─▶ provider.notice ─▶ its worker hands back, it ends

Invariants
- A name that has been started is never started again, whatever the book says: that machine is gone, and the head will
  see that it does not come.
"""

from __future__ import annotations

from collections.abc import Callable

from supervisors.providers.base import log
from supervisors.providers.function_book import KIND, machines_of
from supervisors.providers.provider import How, Provider
from supervisors.tree.errors import ProviderError


class FunctionMachines:
    """Starts and ends the machines of one run's functions.

    Args:
        window_s: time in which a machine that is not wanted any more has to end.
        tell: hears, for people, of machines that could not be had or have ended by themselves.
    """

    def __init__(self, provider: Provider, window_s: float, tell: Callable[[str], None]) -> None:
        self._provider, self._window_s, self._tell = provider, window_s, tell
        self._begun: set[str] = set()
        self._leaving: set[str] = set()
        self._words: dict[str, str] = {}
        provider.on_end, provider.on_news = self._ended, self._heard

    def follow(self, book: str) -> None:
        """Start and end machines as the head's book says, which has changed."""
        wanted = machines_of(book)
        for node in [node for node in self._provider.running if node not in wanted and node not in self._leaving]:
            self._leaving.add(node)
            self._provider.notice(node, self._window_s)
        for node in wanted:
            if node not in self._begun:
                self._begun.add(node)
                self._start(node)

    def _start(self, node: str) -> None:
        try:
            self._provider.start(node, KIND)
        except ProviderError as error:
            log.warning("a function was not started", node=node, why=str(error))
            self._tell(f"the function {node} was not started: {error}")

    def _heard(self, node: str, words: str) -> None:
        if self._words.get(node) != words:
            self._words[node] = words
            self._tell(f"{node}: {words}")

    def _ended(self, node: str, how: How) -> None:
        self._leaving.discard(node)
        self._words.pop(node, None)
        if how == "failed":
            self._tell(f"the machine of the function {node} has ended by itself")
