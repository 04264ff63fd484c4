"""What the gateway remembers is bounded in number and in size."""

from __future__ import annotations

from actors.gateway.bounded_cache import BoundedCache


def test_the_least_lately_asked_for_goes_first_when_there_are_too_many_or_they_are_too_large() -> None:
    made: list[str] = []

    def value(key: str, size: int) -> list[int]:
        return known.get(key, lambda: made.append(key) or [0] * size)

    known = BoundedCache[list[int]](kept=3, most=10, size=len)
    for key in ("a", "b", "a", "c", "d", "a", "b"):
        value(key, 1)
    assert made == ["a", "b", "c", "d", "b"], "three are kept"
    value("large", 9)
    assert (len(known), known.held) == (2, 10)
    value("b", 1)
    value("larger than all", 11)
    assert (len(known), known.held) == (0, 0), "what has no room at all is made, and not kept"
