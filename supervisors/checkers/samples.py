"""Checks of samples and their tokens: each sample ends in exactly one way, and has no token twice or missing."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import xxhash

from actors.ledger.committed import CommittedSample
from supervisors.checkers.followed import COMMITTED, DROPPED, SETTLED, Complaint, Name, Sample, Topic
from supervisors.checkers.history import History, RunState, Violation
from supervisors.checkers.replay import Replay

SAMPLES, TOKENS = "samples", "tokens"


def complaints(checker: str, replay: Replay, topic: str) -> Iterator[Violation]:
    """What the replay found wrong about ``topic``, as violations."""
    for complaint in replay.complaints:
        if complaint.topic == topic:
            yield _violation(checker, complaint)


def _violation(checker: str, complaint: Complaint) -> Violation:
    step, prompt, sibling = complaint.name or (complaint.step, None, None)
    return Violation(
        checker=checker,
        what=f"{complaint.what} (journal event {complaint.event})",
        step=step,
        prompt=prompt,
        sibling=sibling,
        token_index=complaint.token_index,
        worker=complaint.worker,
    )


def check_samples(history: History, replay: Replay) -> Iterator[Violation]:
    """Every sample ends in exactly one of committed and dropped(reason)."""
    yield from complaints(SAMPLES, replay, Topic.SAMPLE)
    records: dict[Name, CommittedSample] = {}
    for record in history.samples:
        name = name_of(record)
        if name in records:
            yield Violation.of(SAMPLES, name, f"{name} has two ends: {_end(records[name])} and {_end(record)}")
        records[name] = record
        yield from _check_record(name, record, replay)
    for step, batch in replay.batches.items():
        if step in replay.commits:
            yield from (v for sample in batch.samples for v in _check_end(sample, records))
        elif history.state is RunState.FINISHED:
            open_ = [sample for sample in batch.samples if sample.state not in SETTLED]
            for sample in open_:
                yield Violation.of(SAMPLES, sample.name, f"{sample.name} is still {sample.state} in a finished run")


def _check_record(name: Name, record: CommittedSample, replay: Replay) -> Iterator[Violation]:
    if record.state not in SETTLED:
        yield Violation.of(SAMPLES, name, f"{name} is put down as {record.state}, which is no end")
        return
    if record.state == DROPPED and not record.reason:
        yield Violation.of(SAMPLES, name, f"{name} was dropped without a reason")
    named = replay.commits.get(name.step)
    if named is None:
        yield Violation.of(
            SAMPLES, name, f"{name} is put down as {record.state}, but step {name.step} was never committed"
        )
    elif (name[1:] in named) is not (record.state == COMMITTED):
        which = "names it" if name[1:] in named else "does not name it"
        yield Violation.of(SAMPLES, name, f"{name} is put down as {record.state}, but the commit of its step {which}")


def _check_end(sample: Sample, records: dict[Name, CommittedSample]) -> Iterator[Violation]:
    """Check a sample of a committed step whose events are still there."""
    name, record = sample.name, records.get(sample.name)
    if sample.state not in SETTLED:
        yield Violation.of(
            SAMPLES, name, f"{name} is neither committed nor dropped: it is {sample.state}, its step is over"
        )
    if record is None:
        yield Violation.of(SAMPLES, name, f"{name} is not put down among the samples of its committed step")
    elif record.state != sample.state and sample.state in SETTLED:
        yield Violation.of(SAMPLES, name, f"{name} is put down as {record.state}, but was {sample.state}")
    elif sample.state == COMMITTED and sample.reward != record.reward:
        yield Violation.of(SAMPLES, name, f"{name} was scored {sample.reward}, but is put down with {record.reward}")


def _end(record: CommittedSample) -> str:
    return f"{record.state} ({record.reason})" if record.reason else record.state


def check_tokens(history: History, replay: Replay) -> Iterator[Violation]:
    """No token index occurs twice, none is missing: recorded tokens are those of the reports, joined."""
    yield from complaints(TOKENS, replay, Topic.TOKENS)
    known = {sample.name: sample for sample in replay.samples}
    for record in history.samples:
        sample = known.get(name_of(record))
        if sample is not None:
            yield from _compare(sample, record)


def _compare(sample: Sample, record: CommittedSample) -> Iterator[Violation]:
    name, have, said = sample.name, len(sample.tokens), record.n_tokens
    worker = sample.workers[-1] if sample.workers else None
    if said > have:
        what = f"{name} has {said} tokens put down, but the reports that followed on made {have}:"
        what = f"{what} token index {have} and what follows was entered twice or out of nowhere"
        yield Violation.of(TOKENS, name, what, token_index=have, worker=worker)
    elif said < have:
        what = f"{name} has {said} tokens put down, but the reports made {have}: token index {said} is missing"
        yield Violation.of(TOKENS, name, what, token_index=said, worker=worker)
    elif tokens_hash(sample.tokens) != record.tokens_hash:
        what = f"{name}: its {said} tokens are not those that the reports made (other hash)"
        yield Violation.of(TOKENS, name, what, worker=worker)


def tokens_hash(tokens: list[int]) -> str:
    """The hash of tokens as ``CommittedSample.tokens_hash`` has it."""
    return xxhash.xxh3_128_hexdigest(np.asarray(tokens, "<i4").tobytes())


def name_of(record: CommittedSample) -> Name:
    return Name(record.step, record.prompt, record.sibling)
