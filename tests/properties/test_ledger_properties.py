"""Random schedules of assign, append, die, duplicate, score, commit, crash and rewind never lose or double anything.

The model is the obvious one: a dict of samples with a list of tokens each. Token t of a sample is a function of the
sample and t, so a token that is lost, doubled or out of order shows.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from actors.ledger import events as ev
from actors.ledger.batch import SampleState
from actors.ledger.errors import IllegalTransition
from actors.ledger.ledger import Ledger
from actors.ledger.memory_journal import MemoryJournal
from actors.protocol.tokens import FinishReason
from actors.protocol.work import SamplingParams

PROMPTS, GROUP, BUDGET, STEPS = 2, 2, 4, 4
ROWS = PROMPTS * GROUP
WORKERS = ("a", "b")


def token(step: int, row: int, position: int) -> int:
    return 1000 * step + 100 * row + position


@dataclass
class Held:
    """A hand-out as its worker sees it."""

    step: int
    row: int
    at: int


@dataclass
class Fleet:
    live: dict[str, dict[int, Held]] = field(default_factory=lambda: {w: {} for w in WORKERS})
    dead: list[tuple[str, int, Held]] = field(default_factory=list[tuple[str, int, Held]])


class LedgerMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.ledger, self.journal, self.fleet = Ledger(), MemoryJournal(), Fleet()
        self.tokens: dict[tuple[int, int], int] = {}
        self.committed: dict[int, set[int]] = {}
        self.term = 0
        self.open()

    def do(self, event: ev.Event) -> None:
        self.ledger.apply(event)
        self.journal.append(event)

    def open(self) -> None:
        self.term += 1
        for worker, held in self.fleet.live.items():
            self.fleet.dead += [(worker, number, h) for number, h in held.items()]
            held.clear()
        self.do(ev.Opened(self.term))

    @rule()
    def issue(self) -> None:
        step = self.ledger.issued_steps
        if step >= STEPS:
            return
        self.do(
            ev.BatchIssued(
                step, GROUP, SamplingParams(max_tokens=BUDGET), np.arange(step * PROMPTS, (step + 1) * PROMPTS),
                np.ones(PROMPTS, np.int32), np.zeros(PROMPTS, np.int32), [b""] * PROMPTS,
            )
        )  # fmt: skip

    @rule(worker=st.sampled_from(WORKERS), data=st.data())
    def assign(self, worker: str, data: st.DataObject) -> None:
        for step, batch in self.ledger.batches.items():
            queued = np.nonzero(batch.state == SampleState.QUEUED)[0].astype(np.int32)
            if len(queued):
                rows = queued[: data.draw(st.integers(1, len(queued)))]
                first = self.ledger.next_assignment
                for i, row in enumerate(rows.tolist()):
                    self.fleet.live[worker][first + i] = Held(step, row, int(batch.length[row]))
                self.do(ev.Assigned.to_one(worker, step, first, rows))
                return

    def report(self, worker: str, rows: list[tuple[int, Held, int, int]]) -> ev.TokensAppended:
        """Rows of (assignment, hand-out, tokens, finish)."""
        tokens = [token(h.step, h.row, h.at + i) for _, h, n, _ in rows for i in range(n)]
        return ev.TokensAppended.one(
            worker, 7, np.array([r[0] for r in rows], np.int64), np.array([h.at for _, h, _, _ in rows], np.int32),
            np.array([n for _, _, n, _ in rows], np.int32), np.array([f for *_, f in rows], np.uint8),
            np.array(tokens, np.int32), np.zeros(len(tokens), np.float32),
        )  # fmt: skip

    @rule(worker=st.sampled_from(WORKERS), data=st.data(), twice=st.booleans())
    def append(self, worker: str, data: st.DataObject, twice: bool) -> None:
        held = self.fleet.live[worker]
        rows: list[tuple[int, Held, int, int]] = []
        for number, h in list(held.items()):
            n = data.draw(st.integers(0, min(2, BUDGET - h.at)))
            spent = h.at + n == BUDGET
            codes = (FinishReason.RUNNING, FinishReason.RUNNING, FinishReason.STOP, FinishReason.ABORTED)
            finish = FinishReason.LENGTH if spent else data.draw(st.sampled_from(codes))
            rows.append((number, h, n, int(finish)))
        event = self.report(worker, rows)
        self.do(event)
        for number, h, n, finish in rows:
            h.at += n
            self.tokens[h.step, h.row] = h.at
            if finish:
                del held[number]
        if twice:
            self.do(event)

    @rule(worker=st.sampled_from(WORKERS), data=st.data())
    def append_with_a_gap(self, worker: str, data: st.DataObject) -> None:
        held = self.fleet.live[worker]
        if held:
            number = data.draw(st.sampled_from(sorted(held)))
            h = held[number]
            if h.at + 2 <= BUDGET:
                self.do(self.report(worker, [(number, Held(h.step, h.row, h.at + 1), 1, 0)]))

    @rule(data=st.data())
    def a_dead_worker_speaks(self, data: st.DataObject) -> None:
        if self.fleet.dead:
            worker, number, h = data.draw(st.sampled_from(self.fleet.dead))
            if h.at < BUDGET:
                before = self.ledger.counters.unknown_rows
                self.do(self.report(worker, [(number, h, 1, int(FinishReason.STOP))]))
                assert self.ledger.counters.unknown_rows == before + 1

    @rule(worker=st.sampled_from(WORKERS))
    def die(self, worker: str) -> None:
        numbers = self.ledger.in_flight(worker)
        assert sorted(numbers.tolist()) == sorted(self.fleet.live[worker])
        self.do(ev.Returned(worker, numbers, "killed"))
        self.fleet.dead += [(worker, n, h) for n, h in self.fleet.live[worker].items()]
        self.fleet.live[worker].clear()

    @rule(data=st.data())
    def score_or_drop(self, data: st.DataObject) -> None:
        for step, batch in self.ledger.batches.items():
            rows = np.nonzero(batch.state == SampleState.FINISHED)[0].astype(np.int32)
            if len(rows):
                if data.draw(st.integers(0, 5)) == 0:
                    self.do(ev.Dropped(step, rows[:1], "no_result"))
                else:
                    self.do(ev.Scored(step, rows, np.ones(len(rows))))

    @precondition(lambda self: self.ledger.trainer_step in self.ledger.batches)
    @rule()
    def lease(self) -> None:
        step = self.ledger.trainer_step
        batch = self.ledger.batches[step]
        wanted = SampleState.COMMITTED if batch.committed else SampleState.SCORED
        rows = np.nonzero(batch.state == wanted)[0].astype(np.int32)
        self.do(ev.Granted(step, rows, replay=batch.committed))

    @precondition(lambda self: self.ledger.trainer_step in self.ledger.batches)
    @rule(data=st.data())
    def commit(self, data: st.DataObject) -> None:
        step = self.ledger.trainer_step
        batch = self.ledger.batches[step]
        named = np.isin(batch.state, (SampleState.COMMITTED, SampleState.GRANTED))
        rows = np.nonzero(named)[0]
        if step in self.committed and len(rows) and data.draw(st.booleans()):
            rows = rows[1:]
        event = ev.Committed(step, batch.prompts[rows // GROUP], (rows % GROUP).astype(np.int32), step + 1)
        settled = bool(np.all(named | (batch.state == SampleState.DROPPED)))
        same = step not in self.committed or self.committed[step] == set(rows.tolist())
        try:
            self.do(event)
        except IllegalTransition:
            assert not (settled and same)
            return
        assert settled and same
        self.committed.setdefault(step, set(rows.tolist()))

    @rule(data=st.data(), worker=st.sampled_from(WORKERS))
    def things_go_well(self, data: st.DataObject, worker: str) -> None:
        """A long stretch without faults, without which random schedules hardly ever reach a commit."""
        if self.ledger.trainer_step not in self.ledger.batches:
            self.issue()
        batch = self.ledger.batches.get(self.ledger.trainer_step)
        if batch is None:
            return
        for held in self.fleet.live.values():
            for number in [n for n, h in held.items() if h.step == batch.step]:
                h = held.pop(number)
                self.finish(next(w for w in WORKERS if self.fleet.live[w] is held), number, h)
        for row in np.nonzero(batch.state == SampleState.QUEUED)[0].astype(np.int32):
            number = self.ledger.next_assignment
            self.do(ev.Assigned.to_one(worker, batch.step, number, np.array([row], np.int32)))
            self.finish(worker, number, Held(batch.step, int(row), int(batch.length[row])))
        finished = np.nonzero(batch.state == SampleState.FINISHED)[0].astype(np.int32)
        if len(finished):
            self.do(ev.Scored(batch.step, finished, np.ones(len(finished))))
        self.lease()
        self.commit(data)

    def finish(self, worker: str, number: int, held: Held) -> None:
        rest = BUDGET - held.at
        self.do(self.report(worker, [(number, held, rest, int(FinishReason.LENGTH))]))
        self.tokens[held.step, held.row] = BUDGET

    @rule(data=st.data())
    def the_trainer_restarts(self, data: st.DataObject) -> None:
        self.do(ev.Rewound(data.draw(st.integers(0, self.ledger.committed_steps))))

    @rule()
    def the_head_crashes(self) -> None:
        floor, events = self.journal.read()
        again = Ledger(floor)
        again.restore(events)
        assert again.counters == self.ledger.counters and again.count_states() == self.ledger.count_states()
        self.ledger = again
        self.open()

    @invariant()
    def every_token_is_there_once_and_in_order(self) -> None:
        for step, batch in self.ledger.batches.items():
            ragged = batch.ragged(np.arange(ROWS, dtype=np.int32))
            want = [token(step, row, t) for row in range(ROWS) for t in range(self.tokens.get((step, row), 0))]
            assert ragged.tokens.tolist() == want

    @invariant()
    def nothing_is_lost_or_trained_twice(self) -> None:
        assert self.ledger.counters.prompts_lost == 0
        assert self.ledger.counters.samples_trained_twice == 0
        for step, rows in self.committed.items():
            now = np.nonzero(self.ledger.batches[step].state == SampleState.COMMITTED)[0]
            assert set(now.tolist()) == rows

    @invariant()
    def what_is_held_by_workers_is_what_the_ledger_thinks(self) -> None:
        for worker, held in self.fleet.live.items():
            assert sorted(self.ledger.in_flight(worker).tolist()) == sorted(held)


LedgerMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestLedger = LedgerMachine.TestCase
