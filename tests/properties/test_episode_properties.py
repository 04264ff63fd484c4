"""Random schedules of episodes: environments speak, workers answer and die, rows are cut, heads and trainers restart.

Every schedule is folded three times: by the ledger as it goes, by a ledger that is restored from the journal, and by
the checkers' own fold, which knows tokens one by one. All three must agree.
"""

from __future__ import annotations

from collections import Counter

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from actors.ledger import events as ev
from actors.ledger.batch import SampleState
from actors.ledger.errors import IllegalTransition
from actors.ledger.ledger import Ledger
from actors.ledger.memory_journal import MemoryJournal
from actors.protocol.groups import GroupGrant
from actors.protocol.marks import contexts, turn_starts
from actors.protocol.tokens import FinishReason
from actors.trainer.learning.rules import LearningRule
from actors.trainer.learning.samples import group_samples
from configs.learning_schema import AlgorithmConfig
from supervisors.checkers.replay import Replay
from tests.actors.ledger import episode_events as ee

ROWS, WORKERS = 4, ("w", "v")
S = SampleState
rows = st.integers(0, ROWS - 1)
GRPO = LearningRule(AlgorithmConfig(), ee.SAMPLING.max_tokens)


class EpisodeMachine(RuleBasedStateMachine):
    """One step of four episodes."""

    def __init__(self) -> None:
        super().__init__()
        self.ledger, self.journal, self.replay, self.term = Ledger(), MemoryJournal("j"), Replay(), 0
        self.said = 0
        """Tokens that the model has said: each is another one, so that none can stand for another."""
        self.discarded: Counter[int] = Counter()
        self.version = 0
        self.open()
        self.do(ee.issued())

    def do(self, event: ev.Event) -> None:
        before = self.model_tokens()
        self.ledger.apply(event)
        self.journal.append(event)
        self.replay.fold(event)
        self.discarded += before - self.model_tokens()

    def model_tokens(self) -> Counter[int]:
        if not self.ledger.batches:
            return Counter()
        held = self.ledger.batches[0].ragged(np.arange(ROWS, dtype=np.int32))
        return Counter(held.tokens[held.versions >= 0].tolist())

    def open(self) -> None:
        self.term += 1
        self.do(ev.Opened(self.term))

    def state(self, row: int) -> SampleState:
        return S(int(self.ledger.batches[0].state[row]))

    @rule(row=rows)
    def begin(self, row: int) -> None:
        if self.state(row) < S.FINISHED:
            self.do(ev.EpisodesBegun(0, np.array([row], np.int32)))

    @rule(row=rows, count=st.integers(1, 3), fresh=st.booleans(), most=st.integers(1, 5))
    def turn(self, row: int, count: int, fresh: bool, most: int) -> None:
        """Also where there is no room for one: it is refused, and nothing has changed."""
        batch = self.ledger.batches[0]
        if batch.committed:
            return
        event = ee.a_turn(self.ledger, row, "!" * count, fresh=fresh or not batch.length[row], most=most)
        before = batch.length.tolist(), batch.state.tolist()
        try:
            self.ledger.apply(event)
        except IllegalTransition:
            assert before == (batch.length.tolist(), batch.state.tolist())
        else:
            self.journal.append(event)
            self.replay.fold(event)

    @rule(worker=st.sampled_from(WORKERS))
    def assign(self, worker: str) -> None:
        queued = np.nonzero(self.ledger.batches[0].state == S.QUEUED)[0].astype(np.int32)
        if len(queued):
            self.do(ev.Assigned.to_one(worker, 0, self.ledger.next_assignment, queued[:1]))

    @rule(worker=st.sampled_from(WORKERS), data=st.data())
    def say(self, worker: str, data: st.DataObject) -> None:
        batch = self.ledger.batches[0]
        for number in self.ledger.in_flight(worker).tolist():
            [(_, [row])] = self.ledger.located(worker, np.array([number])).items()
            left = int(batch.limit[row] - batch.length[row])
            n = data.draw(st.integers(0, left))
            tokens = np.arange(1000 + self.said, 1000 + self.said + n, dtype=np.int32)
            self.said += n
            finish = data.draw(st.sampled_from((FinishReason.RUNNING, FinishReason.STOP, FinishReason.ABORTED)))
            finish = FinishReason.LENGTH if n == left else finish
            event = ev.TokensAppended.one(
                worker, self.version, np.array([number]), batch.length[[row]].copy(), np.array([n], np.int32),
                np.array([finish], np.uint8), tokens, np.zeros(n, np.float32),
            )  # fmt: skip
            self.do(event)

    @rule()
    def publish(self) -> None:
        self.version += 1

    @rule(worker=st.sampled_from(WORKERS))
    def die(self, worker: str) -> None:
        self.do(ev.Returned(worker, self.ledger.in_flight(worker), "killed"))

    @rule(row=rows, data=st.data())
    def cut(self, row: int, data: st.DataObject) -> None:
        if self.state(row) < S.FINISHED:
            length = int(self.ledger.batches[0].length[row])
            self.do(ee.cut(row, data.draw(st.integers(0, length))))

    @rule(row=rows)
    def end(self, row: int) -> None:
        if self.state(row) < S.FINISHED:
            self.do(ee.ended(row))

    @rule(row=rows)
    def drop(self, row: int) -> None:
        if self.state(row) < S.GRANTED and row == 3:  # or there would seldom be a commit
            self.do(ev.Dropped(0, np.array([row], np.int32), "no_result"))

    @precondition(lambda self: not self.ledger.batches[0].committed)
    @rule()
    def commit(self) -> None:
        batch = self.ledger.batches[0]
        if (batch.state < S.FINISHED).any():
            return
        named = np.nonzero(batch.state == S.SCORED)[0].astype(np.int32)
        self.do(ev.Granted(0, named))
        self.do(ev.Committed(0, batch.prompts[named // 2], named % 2, 1))

    @rule()
    def the_head_crashes(self) -> None:
        floor, events = self.journal.read()
        again = Ledger(floor)
        again.restore(events)
        assert again.counters == self.ledger.counters
        for name in ("state", "length", "limit", "turns", "lives", "finish", "attempts"):
            ours, theirs = (getattr(ledger.batches[0], name).tolist() for ledger in (self.ledger, again))
            assert ours == theirs, name
        self.ledger = again
        self.open()

    @invariant()
    def the_checkers_fold_agrees_and_has_nothing_to_complain_of(self) -> None:
        batch = self.ledger.batches[0]
        assert self.replay.complaints == []
        for row, sample in enumerate(self.replay.batches[0].samples):
            held = batch.ragged(np.array([row], np.int32))
            assert (sample.tokens, sample.versions) == (held.tokens.tolist(), held.versions.tolist())
            names = {"in flight": ("assigned", "streaming")}
            assert self.state(row).name.lower() in names.get(sample.state, (sample.state,))

    @invariant()
    def rows_are_what_they_should_be(self) -> None:
        batch = self.ledger.batches[0]
        for row in range(ROWS):
            marks = batch.ragged(np.array([row], np.int32)).versions
            assert not len(marks) or marks[0] == -2
            said = marks[marks >= 0]
            assert len(said) <= ee.SAMPLING.max_tokens and (np.diff(said) >= 0).all()
            due = self.state(row) in (S.QUEUED, S.ASSIGNED, S.STREAMING)
            between = due and (marks[-1] < 0)
            if self.state(row) is not S.DROPPED:  # and a turn may have ended without a token
                assert len(turn_starts(marks)) + between <= batch.turns[row] <= ee.LIMITS.turns_max
            if due:
                assert batch.length[row] < batch.limit[row] <= ee.LIMITS.episode_tokens
            if self.state(row) is S.SCORED:
                assert not len(marks) or marks[-1] >= 0

    @invariant()
    def no_token_of_the_model_is_lost_uncounted_or_there_twice(self) -> None:
        held = self.model_tokens()
        assert set(held.values()) | set(self.discarded.values()) <= {1}
        assert held + self.discarded == Counter(range(1000, 1000 + self.said))
        assert self.ledger.counters.tokens == self.said
        assert self.ledger.counters.tokens_discarded == self.discarded.total() == self.replay.episodes.discarded

    @invariant()
    def what_is_trained_is_every_token_of_the_model_once(self) -> None:
        batch = self.ledger.batches[0]
        held = batch.ragged(np.arange(ROWS, dtype=np.int32))
        group = GroupGrant(
            job="j", step=self.version, prompt=0, replay=False, prompt_ids=np.zeros(0, np.int32),
            siblings=np.arange(ROWS, dtype=np.int32), lengths=held.lengths, tokens=held.tokens,
            logprobs=held.logprobs, versions=held.versions, finished=batch.finish, rewards=np.arange(4.0),
        )  # fmt: skip
        samples = group_samples(group, GRPO, max_staleness=self.version + 1)
        trained = Counter(
            token for s in samples for token in s.tokens[slice(None) if s.mask is None else s.mask].tolist()
        )
        assert trained == self.model_tokens()
        assert len(samples) <= sum(len(contexts(part)) for part in np.split(held.versions, np.cumsum(held.lengths)))


EpisodeMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestEpisodes = EpisodeMachine.TestCase
