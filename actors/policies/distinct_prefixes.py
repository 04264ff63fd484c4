"""How many tokens some prompts have if each beginning that they have in common counts once: the nodes of their trie.

s s a a
s s a b  ─▶  s s a a b c: 6 nodes, of 11 tokens
s s c
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np


def distinct_tokens(prompts: Sequence[np.ndarray]) -> int:
    """Nodes of the trie of ``prompts``, int32[any] each.

    Where what begins alike stands together, a prompt adds what it does not share with the one before it.
    """
    ordered = sorted(
        (np.ascontiguousarray(prompt, np.int32) for prompt in prompts), key=lambda prompt: prompt.tobytes()
    )
    return sum(map(len, prompts)) - sum(_shared(one, other) for one, other in pairwise(ordered))


def _shared(one: np.ndarray, other: np.ndarray) -> int:
    most = min(len(one), len(other))
    differs = one[:most] != other[:most]
    return int(differs.argmax()) if differs.any() else most
