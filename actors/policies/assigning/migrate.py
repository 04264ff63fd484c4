"""What becomes of the samples of a worker that will not go on with them: it is preempted, drained, or goes to train.

RLBoost (arXiv 2510.19225) sections "live request tracking and migration" and "failure handling". In words:

- A sample goes on elsewhere from its prompt and the tokens that it has, after one prefill and with what is left of its
  budget. No cache travels, no token is generated twice, and siblings part without harm.
- Pending samples leave at once: another worker may begin them now.
- Running ones stay while the worker has notice: what it still generates is streamed, so nothing of it is lost. They
  leave ``margin_s`` before its end, time enough for the last reports to arrive.
- Samples that hold the most tokens are handed out first: on a long tail, everybody will wait for these.

Pure: samples and the time that is left in, moves out.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class HeldSample:
    """Describes a sample that the leaving worker holds."""

    sample: int
    tokens: int
    """Tokens that the sample has so far."""
    running: bool


def decide(held: Iterable[HeldSample], left_s: float, *, margin_s: float = 0.0) -> list[HeldSample]:
    """The samples that leave now, in the order in which they are queued again, before all that has not begun.

    ``left_s``: seconds until the worker ends; 0: it has ended, or must.
    """
    ends = left_s <= margin_s
    return sorted((s for s in held if ends or not s.running), key=lambda s: (-s.tokens, s.sample))
