"""The checkers' fold and the ledger, two programs for the same rules, agree on every random schedule."""

from __future__ import annotations

import numpy as np
from hypothesis import settings

from actors.ledger.batch import IN_FLIGHT, SampleState
from supervisors.checkers import replay as r
from supervisors.checkers.replay import replay
from tests.properties.test_ledger_properties import GROUP, ROWS, LedgerMachine

STATES = {
    SampleState.QUEUED: r.QUEUED,
    SampleState.FINISHED: r.FINISHED,
    SampleState.SCORED: r.SCORED,
    SampleState.GRANTED: r.GRANTED,
    SampleState.COMMITTED: r.COMMITTED,
    SampleState.DROPPED: r.DROPPED,
} | dict.fromkeys(IN_FLIGHT, r.IN_FLIGHT)


class ReplayMachine(LedgerMachine):
    def teardown(self) -> None:
        _, events = self.journal.read()
        folded = replay(events)
        assert folded.complaints == []
        assert folded.committed_steps == self.ledger.committed_steps
        for step, batch in self.ledger.batches.items():
            ragged = batch.ragged(np.arange(ROWS, dtype=np.int32))
            ends = np.cumsum(ragged.lengths)
            for row, sample in enumerate(folded.batches[step].samples):
                assert sample.name == (step, int(batch.prompts[row // GROUP]), row % GROUP)
                assert sample.state == STATES[SampleState(int(batch.state[row]))]
                assert sample.tokens == ragged.tokens[ends[row] - ragged.lengths[row] : ends[row]].tolist()
                assert len(sample.workers) == int(batch.attempts[row])
        for worker in ("a", "b"):
            held = folded.workers.get(worker, r.Held()).now
            assert held == len(self.ledger.in_flight(worker))


ReplayMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestReplay = ReplayMachine.TestCase
