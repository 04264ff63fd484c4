"""One rule for names: what is none is said in a sentence that can itself be printed."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from configs.names import (
    NAME_CHARACTERS_MAX,
    NODE_NAME_CHARACTERS_MAX,
    name_problem,
    node_name_problem,
    rank_name,
    ranks_in_words,
)


@pytest.mark.parametrize("name", ["a", "gpu-1", "A100.rack_3", "0", "rollout-node.2", "x" * NAME_CHARACTERS_MAX])
def test_names_are_names(name: str) -> None:
    assert name_problem(name) == ""


@pytest.mark.parametrize(
    "name",
    ["", ".", "..", "a..b", "../a", "a/b", "/etc", "a b", "a\n", "\na", "a\x1b[31m", "\x00", "-a", "_a", ".a", "ä",
     "x" * (NAME_CHARACTERS_MAX + 1), "*", "{name}", "a:b"],
)  # fmt: skip
def test_what_is_no_name_is_said_in_a_line_of_plain_characters(name: str) -> None:
    problem = name_problem(name)
    assert (problem and problem.isascii()) or "…" in problem
    assert problem.isprintable()


@given(st.text())
def test_any_text_is_a_name_or_has_a_problem_that_can_be_printed(name: str) -> None:
    problem = name_problem(name)
    assert problem.isprintable()
    if not problem:
        assert name.isprintable() and "/" not in name and ".." not in name and len(name) <= NAME_CHARACTERS_MAX


@pytest.mark.parametrize("name", ["head", "machine", "x" * (NODE_NAME_CHARACTERS_MAX + 1), ""])
def test_a_machine_may_not_be_called_as_the_heads_own_or_too_long(name: str) -> None:
    assert node_name_problem(name)
    assert node_name_problem("heads") == ""


@pytest.mark.parametrize(
    ("ranks", "words"), [([1], "rank 1"), ([3, 2], "ranks 2 and 3"), ([10, 9, 8], "ranks 8 to 10"), ([0], "rank 0")]
)
def test_ranks_of_one_machine_are_said_in_words(ranks: list[int], words: str) -> None:
    assert ranks_in_words([rank_name("j.trainer", rank) for rank in ranks]) == words
