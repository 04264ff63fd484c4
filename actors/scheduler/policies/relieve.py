"""Which running samples go to a worker that has nothing to do, while a step waits for its last ones.

This project's own (docs/papers/combined.md). A decode step costs its launches and the reading of the weights, and a
share for each sequence, so a sample is made faster the fewer run beside it. ``balance.py`` (RLBoost) moves what is
above a worker's plateau, for throughput; below it nothing moves, and a machine that had come back from training stood
idle beside engines that ran eighty samples each. In words:

- Those of the oldest open step go, since the trainer waits for them; of them the ones with the most tokens, which are
  most likely to be the longest.
- As many as make all workers equally full, at most; they are dealt out to the idle ones in turn.

- Live, neighbours go together, so that a thousand workers need a thousand orders and not five (``orders``): every idle
  one gets as many as it was dealt, but which ones is the assignment policy's choice once they are back.
- Live, a sample goes only where a decode step is shorter by more than ``GAIN``, as measured (``pays``): its prefill has
  to come from somewhere. Without a measurement nothing is moved, as in ``balance.py``.

Pure: what runs in, moves out. Whoever asks has nothing left to hand out.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

GAIN = 0.05
"""Part of a decode step that a move has to save, each step from then on."""


@dataclass(frozen=True, slots=True)
class RunningSample:
    """A sample that a worker with the version in force runs."""

    sample: int
    step: int
    tokens: int
    """That it has."""


@dataclass(frozen=True, slots=True)
class Relief:
    """``sample`` goes on at the worker ``target``."""

    sample: int
    target: str


def decide(running: Sequence[RunningSample], idle: Sequence[str], workers: int) -> list[Relief]:
    """Who goes to the ``idle`` of so many ``workers``, the idle ones among them."""
    if not running or not idle:
        return []
    oldest = min(one.step for one in running)
    first = sorted((one for one in running if one.step == oldest), key=lambda one: (-one.tokens, one.sample))
    room = len(running) * len(idle) // workers
    return [Relief(one.sample, idle[i % len(idle)]) for i, one in enumerate(first[:room])]


def orders(moves: Sequence[Relief], at: Mapping[int, str]) -> dict[tuple[str, str], list[int]]:
    """Source and target → samples; fewer pairs than there are sources and targets. ``at``: sample → who runs it."""
    by_source = sorted((at[move.sample], move.sample) for move in moves)
    dealt: dict[tuple[str, str], list[int]] = {}
    for (source, sample), target in zip(by_source, sorted(move.target for move in moves), strict=True):
        dealt.setdefault((source, target), []).append(sample)
    return dealt


def pays(step_s: float, step_there_s: float) -> bool:
    """Whether a sample is made enough faster where a decode step takes ``step_there_s``; NaN: not measured, so no."""
    return step_there_s < (1 - GAIN) * step_s
