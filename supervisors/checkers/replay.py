"""The journal, folded a second time by other code than the ledger's: plain lists, a sample at a time.

Each event is held against the rules of ``actors/ledger/ledger.py`` as a reader of its docstring would apply them.
What does not fit is noted as a Complaint and the fold goes on with what the event says, so that one wrong event is
reported once and not a thousand times.

                                 ┌─▶ complaints      an event that does not fit what came before it
    events ─▶ Replay.fold ───────┼─▶ samples         each sample's tokens, versions and state
                                 ├─▶ commits         which samples each commit named, first and replayed
                                 └─▶ workers         how many hand-outs each worker holds, and its maximum
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from actors.ledger import events as ev
from actors.ledger.report_check import unsound
from actors.protocol.evaluations import is_evaluation, name_of_batch
from actors.protocol.tokens import FinishReason
from supervisors.checkers.episodes import Episodes
from supervisors.checkers.followed import (
    COMMITTED,
    DROPPED,
    EVALUATED,
    FINISHED,
    GRANTED,
    IN_FLIGHT,
    QUEUED,
    SCORED,
    UNSETTLED,
    WAITING,
    Batch,
    Complaint,
    Held,
    Name,
    Named,
    Sample,
    Topic,
)


class Replay:
    """Holds the folded events of a journal. ``replay`` makes it; checkers only read it."""

    def __init__(self, pruned_below: int = 0, vocabulary: int = 0) -> None:
        """``vocabulary``: number of token ids that the model has; 0: not known."""
        self.pruned_below, self._vocabulary = pruned_below, vocabulary
        self.complaints: list[Complaint] = []
        self.batches: dict[int, Batch] = {}
        self.commits: dict[int, Named] = {}
        """Step → samples that its first commit named."""
        self.replayed: set[int] = set()
        self.granted: dict[int, Named] = {}
        """Step → samples that were granted at its first commit."""
        self.workers: dict[str, Held] = {}
        self.terms: list[int] = []
        self.events = 0
        self.trainer_step = 0
        self._live: dict[int, tuple[Sample, str]] = {}
        self._next_assignment = 0
        self._handlers: dict[type, Callable[[Any], None]] = {
            ev.Opened: self._opened,
            ev.BatchIssued: self._issued,
            ev.BatchExtended: self._extended,
            ev.Assigned: self._assigned,
            ev.TokensAppended: self._appended,
            ev.Returned: self._returned,
            ev.Suspected: lambda _: None,  # changes no sample's state
            ev.Scored: self._scored,
            ev.Dropped: self._dropped,
            ev.Granted: self._granted,
            ev.Committed: self._committed,
            ev.Checkpointed: self._checkpointed,
            ev.Paused: lambda _: None,
            ev.Stopping: lambda _: None,
            ev.WindowLearned: lambda _: None,
            ev.Evaluated: self._evaluated,
            ev.Rewound: self._rewound,
        }
        self.episodes = Episodes(self)
        self._handlers |= self.episodes.handlers

    def fold(self, event: ev.Event) -> None:
        """Take the next event."""
        self._handlers[type(event)](event)
        self.events += 1

    @property
    def samples(self) -> Iterable[Sample]:
        return (sample for batch in self.batches.values() for sample in batch.samples)

    @property
    def live(self) -> list[tuple[Sample, str]]:
        """Hand-outs that have not ended, with their workers."""
        return list(self._live.values())

    @property
    def committed_steps(self) -> int:
        """One past the newest committed step."""
        return max(self.commits, default=-1) + 1

    def _complain(
        self, topic: str, what: str, *, sample: Sample | None = None, step: int | None = None,
        token_index: int | None = None, worker: str | None = None,
    ) -> None:  # fmt: skip
        name = sample.name if sample is not None else None
        self.complaints.append(Complaint(topic, self.events, what, name, step, token_index, worker))

    def complain_of_token(self, sample: Sample, what: str) -> None:
        self._complain(Topic.TOKENS, what, sample=sample)

    def rows(self, step: int, rows: Iterable[int], doing: str) -> list[Sample]:
        """The samples of an event; none of a pruned step, and a complaint about rows that do not exist."""
        batch = self.batches.get(step)
        if batch is None:
            if step >= self.pruned_below or (is_evaluation(step) and not self.pruned_below):
                what = f"{doing} names {name_of_batch(step)}, whose batch was never issued"
                self._complain(Topic.STEP, what, step=step)
            return []
        found: list[Sample] = []
        for row in rows:
            if 0 <= row < len(batch.samples):
                found.append(batch.samples[row])
            else:
                self._complain(Topic.STEP, f"{doing} names row {row} of step {step}, which does not exist", step=step)
        return found

    def move(self, sample: Sample, allowed: tuple[str, ...], to: str, doing: str) -> None:
        if sample.state not in allowed:
            wanted = " or ".join(allowed)
            self._complain(Topic.SAMPLE, f"{doing} {sample.name}, which is {sample.state}, not {wanted}", sample=sample)
        sample.state = to

    # ------------------------------------------------------------ events

    def _opened(self, event: ev.Opened) -> None:
        if self.terms and event.term <= self.terms[-1]:
            self._complain(Topic.STEP, f"the scheduler opened term {event.term} after term {self.terms[-1]}")
        self.terms.append(event.term)
        for number in list(self._live):
            self._hand_back(number)
        for sample in self.samples:
            if sample.state == GRANTED:
                sample.state = SCORED

    def _issued(self, event: ev.BatchIssued) -> None:
        step = event.step
        if step in self.batches:
            self._complain(Topic.STEP, f"the batch of step {step} was issued twice", step=step)
            return
        prompts = [int(p) for p in event.prompts]
        sampling = event.sampling
        stop_ids = frozenset(sampling.stop_token_ids)
        batch = Batch(step, event.group_size, stop_ids, sampling.max_tokens, prompts, [], event.episodes)
        batch.samples += _samples(batch, prompts)
        self.batches[step] = batch

    def _extended(self, event: ev.BatchExtended) -> None:
        batch = self.batches.get(event.step)
        if batch is None:
            if event.step >= self.pruned_below:
                self._complain(Topic.STEP, f"step {event.step} was extended and never issued", step=event.step)
            return
        prompts = [int(p) for p in event.prompts]
        batch.prompts += prompts
        batch.samples += _samples(batch, prompts)

    def _assigned(self, event: ev.Assigned) -> None:
        if event.first < self._next_assignment:
            what = f"assignment {event.first} was given to {event.workers}, but numbers below {self._next_assignment}"
            self._complain(Topic.ASSIGNMENT, f"{what} had been given before", worker=event.workers[0])
        self._next_assignment = max(self._next_assignment, event.first + len(event.rows))
        samples = self.rows(event.step, event.rows.tolist(), f"a hand-out to {event.workers}")
        if len(samples) != len(event.rows):  # pruned, or told above
            return
        workers = [worker for worker, n in zip(event.workers, event.counts.tolist(), strict=True) for _ in range(n)]
        for number, (sample, worker) in enumerate(zip(samples, workers, strict=True), event.first):
            self._handed_out(sample, number, worker, again=event.again)

    def _handed_out(self, sample: Sample, number: int, worker: str, *, again: bool) -> None:
        if sample.assignment >= 0:
            holder = self._live.get(sample.assignment, (sample, "nobody"))[1]
            what = f"{sample.name} was handed to {worker} while {holder} had it"
            self._complain(Topic.ASSIGNMENT, what, sample=sample, worker=worker)
            self._live.pop(sample.assignment, None)
        else:
            self.move(sample, (QUEUED,), IN_FLIGHT, f"{worker} was handed")
        sample.state, sample.assignment = IN_FLIGHT, number
        if again and sample.workers[-1:] != [worker]:
            before = sample.workers[-1] if sample.workers else "nobody"
            what = f"{worker} went on with {sample.name}, which {before} had last"
            self._complain(Topic.ASSIGNMENT, what, sample=sample, worker=worker)
        if not again:
            sample.workers.append(worker)
        self._live[number] = (sample, worker)
        held = self.workers.setdefault(worker, Held())
        held.now += 1
        if held.now > held.most:
            held.most, held.most_at = held.now, self.events

    def _appended(self, event: ev.TokensAppended) -> None:
        for report in event.split():
            self._report(report, report.workers[0], int(report.versions[0]))

    def _report(self, event: ev.TokensAppended, said_by: str, version: int) -> None:
        at = 0
        tokens, counts = event.tokens.tolist(), event.counts.tolist()
        wrong = set(np.flatnonzero(unsound(event.tokens, event.logprobs, self._vocabulary)).tolist())
        columns = zip(event.assignments.tolist(), event.offsets.tolist(), counts, event.finished.tolist(), strict=True)
        for number, offset, count, finished in columns:
            new, own = tokens[at : at + count], range(at, at + count)
            at += count
            sample, worker = self._live.get(number, (None, ""))
            if sample is None or worker != said_by or offset != len(sample.tokens):
                continue  # late, repeated, or behind a gap: it never entered
            batch = self.batches[sample.name.step]
            if offset + count > sample.limit or finished > FinishReason.ABORTED:
                continue
            if odd := wrong.intersection(own):
                first = min(odd)
                index, token, logprob = offset + first - own.start, tokens[first], float(event.logprobs[first])
                what = f"{sample.name}: token index {index} has the id {token} and the log-probability {logprob:g}"
                self._complain(Topic.TOKENS, f"{what}: no sound engine has drawn it", sample=sample,
                               token_index=index, worker=said_by)  # fmt: skip
            self._enter(sample, batch, new, said_by, version)
            if finished in (FinishReason.STOP, FinishReason.LENGTH):
                self.end(number)
                sample.state = FINISHED if batch.episodes is None else WAITING
            elif finished == FinishReason.ABORTED:
                self._hand_back(number)

    def _enter(self, sample: Sample, batch: Batch, new: list[int], worker: str, version: int) -> None:
        for token in new:
            index = len(sample.tokens)
            if index and sample.versions[-1] >= 0 and sample.tokens[-1] in batch.stop_ids:
                what = f"{sample.name}: token index {index} follows the stop token at {index - 1}"
                self._complain(Topic.TOKENS, what, sample=sample, token_index=index, worker=worker)
            sample.tokens.append(token)
            sample.versions.append(version)

    def _returned(self, event: ev.Returned) -> None:
        for number in event.assignments.tolist():
            if self._live.get(number, (None, ""))[1] == event.worker:
                self._hand_back(number)

    def _hand_back(self, number: int) -> None:
        """Return the sample to the queue, unless its tokens already end it, or its turn."""
        sample = self._live[number][0]
        self.end(number)
        batch = self.batches[sample.name.step]
        ended = bool(sample.tokens) and sample.versions[-1] >= 0 and sample.tokens[-1] in batch.stop_ids
        over = FINISHED if batch.episodes is None else WAITING
        sample.state = over if ended or len(sample.tokens) >= sample.limit else QUEUED

    def end(self, number: int) -> None:
        sample, worker = self._live.pop(number)
        sample.assignment = -1
        self.workers[worker].now -= 1

    def _scored(self, event: ev.Scored) -> None:
        samples = self.rows(event.step, event.rows.tolist(), "a verdict")
        for sample, reward in zip(samples, event.rewards.tolist(), strict=False):
            self.move(sample, (FINISHED,), SCORED, "a verdict came for")
            sample.reward = reward

    def _dropped(self, event: ev.Dropped) -> None:
        for sample in self.rows(event.step, event.rows.tolist(), "a drop"):
            self.move(sample, UNSETTLED, DROPPED, "dropped:")
            sample.reason = event.reason
            if sample.assignment >= 0:
                self.end(sample.assignment)

    def _granted(self, event: ev.Granted) -> None:
        if event.step != self.trainer_step and event.step >= self.pruned_below:
            what = f"samples of step {event.step} were granted while the trainer was at step {self.trainer_step}"
            self._complain(Topic.STEP, what, step=event.step)
        allowed, to = ((COMMITTED,), COMMITTED) if event.replay else ((SCORED,), GRANTED)
        for sample in self.rows(event.step, event.rows.tolist(), "a lease"):
            self.move(sample, allowed, to, "granted:")

    def _committed(self, event: ev.Committed) -> None:
        step = event.step
        if step != self.trainer_step:
            what = f"step {step} was committed while the trainer was at step {self.trainer_step}"
            self._complain(Topic.STEP, what, step=step)
        pairs = list(zip(event.prompts.tolist(), event.siblings.tolist(), strict=False))
        named: Named = frozenset(pairs)
        if len(named) != len(pairs):
            twice = next(pair for pair in pairs if pairs.count(pair) > 1)
            what = f"the commit of step {step} names prompt {twice[0]} sibling {twice[1]} twice"
            self._complain(Topic.STEP, what, step=step)
        if step in self.commits:
            self.replayed.add(step)
            self._same_again(step, named)
        else:
            self.commits[step] = named
            self._settle(step, named)
        self.trainer_step = step + 1

    def _same_again(self, step: int, named: Named) -> None:
        first = self.commits[step]
        for prompt, sibling in sorted(first ^ named)[:1]:
            which = "first" if (prompt, sibling) in first else "second"
            what = f"step {step} was committed twice with different samples: prompt {prompt} sibling {sibling} is"
            self._complain(Topic.STEP, f"{what} in the {which} commit only", step=step)

    def _settle(self, step: int, named: Named) -> None:
        batch = self.batches.get(step)
        if batch is None:
            if step >= self.pruned_below:
                self._complain(Topic.STEP, f"step {step} was committed, but its batch was never issued", step=step)
            return
        self.granted[step] = frozenset(s.name[1:] for s in batch.samples if s.state == GRANTED)
        for sample in batch.samples:
            if sample.name[1:] in named:
                sample.state = COMMITTED
            elif sample.state == GRANTED:
                sample.state, sample.reason = DROPPED, "not named by the trainer's commit"

    def _evaluated(self, event: ev.Evaluated) -> None:
        batch = self.batches.get(event.step)
        for sample in batch.samples if batch is not None else ():
            if sample.state != DROPPED:
                self.move(sample, (SCORED,), EVALUATED, "evaluated:")

    def _checkpointed(self, event: ev.Checkpointed) -> None:
        if event.step > self.committed_steps:
            what = f"a checkpoint at step {event.step} is ahead of the {self.committed_steps} committed steps"
            self._complain(Topic.STEP, what, step=event.step)

    def _rewound(self, event: ev.Rewound) -> None:
        if event.step > self.committed_steps:
            what = f"the trainer went on at step {event.step} with {self.committed_steps} steps committed"
            self._complain(Topic.STEP, what, step=event.step)
        self.trainer_step = event.step
        for sample in self.samples:
            if sample.state == GRANTED:
                sample.state = SCORED


def _samples(batch: Batch, prompts: list[int]) -> list[Sample]:
    """Samples of these prompts of the batch, as they begin."""
    state = QUEUED if batch.episodes is None else WAITING
    names = (Name(batch.step, prompt, sibling) for prompt in prompts for sibling in range(batch.group_size))
    return [Sample(name, state, limit=batch.max_tokens) for name in names]


def replay(events: Iterable[ev.Event], pruned_below: int = 0, vocabulary: int = 0) -> Replay:
    """Fold ``events``, of which all but commits may be missing below step ``pruned_below``.

    ``vocabulary``: number of token ids that the model has; 0: not known.
    """
    folded = Replay(pruned_below, vocabulary)
    for event in events:
        folded.fold(event)
    return folded
