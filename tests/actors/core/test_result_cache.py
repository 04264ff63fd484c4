"""Answers kept for repeats: the same one again, for a while, and never more of them than the bound."""

from __future__ import annotations

from actors.core.kernel.answers import Caller
from actors.core.kernel.requests import ResultCache
from transport.address import PeerId


def caller(number: int, incarnation: int = 1) -> Caller:
    return Caller(PeerId("p", incarnation), number)


def test_a_repeat_is_answered_again_until_its_time_is_over() -> None:
    cache, said = ResultCache(entries=8, keep_s=10.0), list[int]()
    assert cache.begin(caller(1), now=0.0)
    assert not cache.begin(caller(1), now=1.0), "it is being worked on: neither run again nor answered twice"
    cache.finish(caller(1), lambda: said.append(1), now=2.0)
    assert not cache.begin(caller(1), now=11.9)
    assert said == [1]
    assert cache.begin(caller(1), now=12.0), "forgotten"
    assert cache.begin(caller(1, incarnation=2), now=12.0), "the same number of another life is another question"


def test_it_never_holds_more_than_its_bound_and_forgets_the_oldest_answer() -> None:
    cache = ResultCache(entries=3, keep_s=1000.0)
    for number in range(100):
        assert cache.begin(caller(number), now=float(number))
        cache.finish(caller(number), lambda: None, now=float(number))
        assert len(cache) <= 3
    assert not cache.begin(caller(99), now=100.0)
    assert cache.begin(caller(0), now=100.0)
