"""Whatever bytes come, a decoder takes them or raises what it says it raises; the same registry is for long runs."""

from __future__ import annotations

import pytest

from actors.core import message as messages
from tests.fuzz.mutation import mutated
from tests.fuzz.targets import Target, as_input, check, frames_of, targets

INPUTS = 300


@pytest.mark.parametrize("name", sorted(targets()))
def test_damaged_input_is_refused_with_the_errors_that_the_decoder_names(name: str) -> None:
    target = targets()[name]
    for data in mutated(target.seeds, INPUTS, name):
        check(target, data)


@pytest.mark.parametrize("name", [name for name in sorted(targets()) if name != "head"])
def test_what_damage_begins_with_is_good(name: str) -> None:
    """Else every input would be refused at the door, and nothing behind it be tried."""
    target = targets()[name]
    target.decode(target.seeds[0])


def test_every_message_of_the_system_has_a_target() -> None:
    known = {tag for tag, kind in messages._by_tag.items() if kind.__module__.startswith(("actors", "supervisors"))}
    assert known == {name.removeprefix("message:") for name in targets() if name.startswith("message:")}
    assert len(known) > 80


def test_a_decoder_that_raises_something_else_is_found() -> None:
    with pytest.raises(ZeroDivisionError):
        check(Target("bad", lambda data: 1 // len(data), (ValueError,)), b"")
    check(Target("good", lambda data: int(data), (ValueError,)), b"x")


def test_frames_travel_as_one_input() -> None:
    frames = [b"", b"a", b"b" * 300]
    assert frames_of(as_input(frames)) == frames
    assert frames_of(b"x") == [b"x"]
