"""Whether a worker's tokens can be what a sound engine has said: asked before they enter the ledger.

    tokens            ids of the model's vocabulary, each with a finite log-probability
    version           one that the worker can have, and that the sample's step may be trained on

Invariants
- What passes can be trained: the trainer meets no id, version or number on which it would have to give up.
- The journal is not judged here: events of before are folded as they are. ``headrace doctor --run`` holds them against
  the same rules.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from actors.ledger.errors import Nonsense
from actors.ledger.events import TokensAppended
from actors.ledger.ledger_state import NO_STEP, LedgerState
from actors.protocol.evaluations import is_evaluation, name_of_batch


def unsound(tokens: np.ndarray, logprobs: np.ndarray, vocabulary: int) -> np.ndarray:
    """bool[n] which tokens no engine can have drawn. ``vocabulary``: number of ids that there are; 0: not known."""
    beyond = tokens >= vocabulary if vocabulary else np.False_
    return (tokens < 0) | beyond | ~np.isfinite(logprobs)


@dataclass(frozen=True)
class ReportCheck:
    """Checks reports of a job whose model has ``vocabulary`` ids (0: not known) and that may be so stale.

    ``route_bytes``: bytes of a token's experts, 0 where the job takes none; None: not known, so not judged.
    """

    vocabulary: int
    staleness: int
    route_bytes: int | None = None

    def check(self, ledger: LedgerState, event: TokensAppended) -> None:
        """Look at reports that have come together.

        Raises:
            Nonsense: at least one of them cannot be sound; nothing has changed.
        """
        if (event.counts < 0).any():
            raise Nonsense("a row of less than no tokens")
        if (wrong := unsound(event.tokens, event.logprobs, self.vocabulary)).any():
            raise self._no_draw(event, wrong)
        routes, wide = event.routes, self.route_bytes
        if routes is not None and wide is not None and routes.shape[1:] != (wide,):
            told = routes.shape[1] if routes.ndim > 1 else 0
            raise Nonsense(f"experts of {told} bytes a token, where the model's take {wide}")
        versions, steps = np.repeat(event.versions, event.row_counts), ledger.steps_of(event)
        told, newest = event.counts > 0, ledger.issued_steps  # a version is made of a step that was issued
        ahead = told & (versions > newest)
        if ahead.any():
            raise Nonsense(f"tokens of version {versions[ahead][0]}; the newest that there can be is {newest}")
        least = np.where(steps < 0, -1 - steps, steps - self.staleness)  # as ``version_of`` has it
        beyond = told & (steps != NO_STEP) & ((versions < least) | ((versions > steps) & (steps >= 0)))
        if beyond.any():
            version, step, first = (int(column[beyond][0]) for column in (versions, steps, least))
            wanted = f"{max(first, 0)} or newer" if is_evaluation(step) else f"from {max(first, 0)} to {step}"
            raise Nonsense(f"tokens of version {version} for {name_of_batch(step)}, which takes versions {wanted}")

    def _no_draw(self, event: TokensAppended, wrong: np.ndarray) -> Nonsense:
        at = int(np.flatnonzero(wrong)[0])
        token, logprob = int(event.tokens[at]), float(event.logprobs[at])
        if np.isfinite(logprob):
            ids = f"ids from 0 to {self.vocabulary - 1}" if self.vocabulary else "ids from 0"
            return Nonsense(f"a token of id {token}; the model has {ids}")
        rows = np.repeat(np.arange(len(event.counts)), event.counts)[wrong]
        return Nonsense(f"a token of log-probability {logprob}", np.unique(event.assignments[rows]))
