"""Tokens of prompts, each common beginning once."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from actors.scheduler.meter import distinct_tokens

prompts = st.lists(st.lists(st.sampled_from([0, 1, 255, 256, 70_000]), max_size=6), max_size=12)
"""Tokens whose bytes are alike where they are not."""


@given(prompts)
def test_distinct_tokens_are_the_nodes_of_the_trie(asked: list[list[int]]) -> None:
    nodes = {tuple(prompt[: n + 1]) for prompt in asked for n in range(len(prompt))}
    assert distinct_tokens([np.array(prompt, np.int32) for prompt in asked]) == len(nodes)
