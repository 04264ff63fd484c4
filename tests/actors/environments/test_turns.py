"""A response is split into turns by the versions of its tokens."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from actors.environments.scoring.reward_worker import TurnSpan, shown_turns, turn_spans


@pytest.mark.parametrize(
    ("versions", "wanted"),
    [
        ([], []),
        ([3, 3, 4], [TurnSpan("model", 0, 3)]),
        ([3, -1, -1, 4], [TurnSpan("model", 0, 1), TurnSpan("environment", 1, 3), TurnSpan("model", 3, 4)]),
        ([0, -2, -1, 1], [TurnSpan("model", 0, 1), TurnSpan("environment", 1, 3, fresh=True), TurnSpan("model", 3, 4)]),
        (
            [0, -1, -2, -1],
            [TurnSpan("model", 0, 1), TurnSpan("environment", 1, 2), TurnSpan("environment", 2, 4, fresh=True)],
        ),
        ([-2, -2], [TurnSpan("environment", 0, 1, fresh=True), TurnSpan("environment", 1, 2, fresh=True)]),
    ],
)
def test_a_turn_ends_where_somebody_else_writes_or_a_fresh_context_begins(
    versions: list[int], wanted: list[TurnSpan]
) -> None:
    assert turn_spans(np.array(versions, np.int32)) == wanted


@given(st.lists(st.integers(-2, 3), max_size=30))
def test_turns_cover_the_response_without_a_gap(versions: list[int]) -> None:
    found = turn_spans(np.array(versions, np.int32))
    assert [place for span in found for place in range(span.start, span.end)] == list(range(len(versions)))
    for span in found:
        assert span.role == ("model" if versions[span.start] >= 0 else "environment")
        assert {version >= 0 for version in versions[span.start : span.end]} == {span.role == "model"}
        assert -2 not in versions[span.start + 1 : span.end]


def test_the_text_of_each_turn_is_decoded_by_itself_and_long_ones_lose_their_middle() -> None:
    def decode(tokens: np.ndarray) -> str:
        return "".join(chr(token) for token in tokens)

    text, versions = "a" * 300 + "bc" + "d" * 3, np.array([1] * 300 + [-1] * 2 + [2] * 3, np.int32)
    said = shown_turns(np.array([ord(char) for char in text]), versions, decode, 105)
    assert [(turn.role, turn.tokens) for turn in said] == [("model", 300), ("environment", 2), ("model", 3)]
    assert [turn.text for turn in said] == [f"{'a' * 75} … 200 characters left out … {'a' * 25}", "bc", "ddd"]


def test_a_response_without_tokens_is_an_empty_turn_of_the_model() -> None:
    (only,) = shown_turns(np.zeros(0, np.int32), np.zeros(0, np.int32), lambda _: "", 10)
    assert (only.role, only.text, only.tokens) == ("model", "", 0)
