"""A response split into turns: whose tokens they are follows from the weight version that stands beside each.

    versions    3  3  3  -1 -1   4  4   -2 -1   5
               └ model ┘ └env ┘ └mod┘  └env ┘ └model
                                       fresh: a new context begins here

Invariants
- Turns cover the response without a gap, in order; one ends where the next one is somebody else's or begins a context.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from actors.core.terminal_text import shares, shortened
from actors.protocol.episodes import FRESH
from actors.protocol.metrics import ShownTurn


@dataclass(frozen=True, slots=True)
class Span:
    """A span is the part of a response from ``start`` to ``end`` that one side has written."""

    role: str
    """``model`` or ``environment``."""
    start: int
    end: int
    fresh: bool = False
    """Whether a fresh context begins with it."""


def spans(versions: np.ndarray) -> list[Span]:
    """The turns of a response, by the version of each token; empty if it has none."""
    model = versions >= 0
    begins = np.ones(len(versions), np.bool_)
    begins[1:] = (model[1:] != model[:-1]) | (versions[1:] == FRESH)
    starts = np.nonzero(begins)[0].tolist()
    return [
        Span("model" if model[start] else "environment", start, end, bool(versions[start] == FRESH))
        for start, end in itertools.pairwise([*starts, len(versions)])
    ]


def turns(tokens: np.ndarray, versions: np.ndarray, decode: Callable[[np.ndarray], str], chars: int) -> list[ShownTurn]:
    """A response as people read it, in about ``chars`` characters; one without tokens is an empty turn of the model."""
    split = spans(versions) or [Span("model", 0, 0)]
    texts = [decode(tokens[span.start : span.end]) for span in split]
    return [
        ShownTurn(role=span.role, text=shortened(text, share), tokens=span.end - span.start, fresh=span.fresh)
        for span, text, share in zip(split, texts, shares([len(text) for text in texts], chars), strict=True)
    ]
