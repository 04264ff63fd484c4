"""There is one machine for each function in the book; each name is started once, and told to go once."""

from __future__ import annotations

from supervisors.providers.function_book import KIND, FunctionBook
from supervisors.providers.function_machines import FunctionMachines
from supervisors.providers.provider import OnEnd, OnNews
from supervisors.tree.errors import ProviderError


class Noted:
    """It is a provider that notes its orders. ``refused``: names of machines that cannot be had."""

    def __init__(self, *refused: str) -> None:
        self.on_end: OnEnd = lambda node, how: None
        self.on_news: OnNews = lambda node, words: None
        self.running: dict[str, str] = {}
        self.orders: list[tuple[str, str]] = []
        self._refused = refused

    def start(self, node: str, kind: str) -> None:
        if node in self._refused:
            raise ProviderError("no slot")
        self.orders.append(("start", node))
        self.running[node] = kind

    def notice(self, node: str, window_s: float) -> None:
        self.orders.append(("notice", node))

    def kill(self, node: str) -> None:
        raise AssertionError(node)

    async def close(self) -> None: ...


def test_machines_follow_the_book_and_what_ends_by_itself_or_cannot_be_had_is_told() -> None:
    provider, told, book = Noted("f1"), list[str](), FunctionBook()
    machines = FunctionMachines(provider, 10.0, told.append)
    first, _, third = book.begin(0.0), book.begin(0.0), book.begin(0.0)
    machines.follow(book.encode())
    assert provider.running == {"f0": KIND, "f2": KIND}
    assert told == ["the function f1 was not started: no slot"]
    for _ in range(2):
        provider.on_news("f0", "the job 1 waits: Priority")
    assert told[1:] == ["f0: the job 1 waits: Priority"]
    del told[1:]
    book.there.remove(first)
    for _ in range(3):  # a second order would end it at once, before its worker has handed anything back
        machines.follow(book.encode())
    assert provider.orders == [("start", "f0"), ("start", "f2"), ("notice", "f0")]
    for node in list(provider.running):
        del provider.running[node]
        provider.on_end(node, "failed" if node == "f2" else "notice")
    machines.follow(book.encode())
    assert told[1:] == ["the machine of the function f2 has ended by itself"]
    assert provider.orders[3:] == [], "the head has yet to see that f2 is gone; its name is not used again"
    assert third.node == "f2"
