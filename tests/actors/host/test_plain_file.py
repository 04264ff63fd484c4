"""What a line of a foreign file may hold."""

from __future__ import annotations

import pytest

from actors.host.plain_file import json_object


def test_a_number_of_64_bits_stays_as_it_is_and_one_of_very_many_digits_is_none() -> None:
    """Lives of processes are told apart by such numbers: without them a resumed run looks like one that goes back."""
    assert json_object('{"incarnation": 1795799025954237700}') == {"incarnation": 1795799025954237700}
    assert json_object(f'{{"seed": {2**64 - 1}}}') == {"seed": 2**64 - 1}
    assert json_object('{"n": ' + "9" * 5000 + "}") == {"n": None}


@pytest.mark.parametrize("line", ["", "[]", "7", '{"a":', '{"a": ' + "[" * 60 + "]" * 60 + "}"])
def test_what_is_no_object_or_too_deep_is_passed_over(line: str) -> None:
    assert json_object(line) is None
