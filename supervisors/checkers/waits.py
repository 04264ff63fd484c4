"""Checks of asks, slots and plans: every ask has ended, slots were given back, and cuts spare the longest part."""

from __future__ import annotations

from collections.abc import Iterator

from supervisors.checkers.followed import Topic
from supervisors.checkers.history import History, RunState, Violation
from supervisors.checkers.replay import Replay
from supervisors.checkers.samples import complaints

ASKS, CREDIT, PLANS = "asks", "credit", "plans"


def check_asks(history: History, replay: Replay) -> Iterator[Violation]:
    """No ask outlived its deadline, and a process that ended in good order had ended all of its asks."""
    for row in history.named("ask_overdue"):
        what = f"{row.get('asker') or 'code outside of actors'} in {row['process']} asked {row['target']}"
        what = f"{what} ({row['question']}) and waited {float(row['overdue_s']):.3g} s past its deadline"
        yield Violation(checker=ASKS, what=what)
    for row in history.named("asks_counted"):
        opened, ended, still = int(row["opened"]), int(row["ended"]), int(row["open"])
        if opened != ended + still:
            lost = f"{opened - ended - still} of {opened} asks of {row['process']} never ended"
            yield Violation(checker=ASKS, what=f"{lost}: {ended} ended, {still} were still open")


def check_credit(history: History, replay: Replay) -> Iterator[Violation]:
    """Hand-outs are numbered once and held once, no worker holds more than its slots, and none is left at the end."""
    yield from complaints(CREDIT, replay, Topic.ASSIGNMENT)
    yield from _slots(history, replay)
    yield from _attempts(history, replay)
    if history.state is RunState.FINISHED:
        for sample, worker in replay.live:
            what = f"{worker} still holds {sample.name} though the run is finished"
            yield Violation.of(CREDIT, sample.name, what, worker=worker)


def _slots(history: History, replay: Replay) -> Iterator[Violation]:
    slots: dict[str, int] = {}
    for row in history.named("worker_registered"):
        worker = str(row["worker"])
        slots[worker] = max(slots.get(worker, 0), int(row["slots"]))
    for worker, held in replay.workers.items():
        if worker in slots and held.most > slots[worker]:
            what = f"{worker} held {held.most} samples at journal event {held.most_at}, but has {slots[worker]} slots"
            yield Violation(checker=CREDIT, what=what, worker=worker)


def _attempts(history: History, replay: Replay) -> Iterator[Violation]:
    known = {sample.name: sample for sample in replay.samples}
    for record in history.samples:
        name = (record.step, record.prompt, record.sibling)
        sample = known.get(name)  # pyright: ignore[reportArgumentType]  a Name is such a tuple
        if sample is not None and len(sample.workers) != record.attempts:
            what = f"{sample.name} was handed out {len(sample.workers)} times, but is put down with {record.attempts}"
            yield Violation.of(CREDIT, name, what, worker=sample.workers[-1] if sample.workers else "nobody")


def check_plans(history: History, replay: Replay) -> Iterator[Violation]:
    """The longest part, for which everybody waits, is never cut, and nobody hands samples over to itself."""
    longest = ""
    for row in history.named("step_planned", "samples_cut"):
        if row["event"] == "step_planned":
            longest = str(row["longest"])
        elif row["worker"] in (longest, row["target"]):
            why = "it had the longest part" if row["worker"] == longest else "what it handed over went to itself"
            step, worker = int(row["step"]), str(row["worker"])
            yield Violation(checker=PLANS, what=f"{worker} was cut in step {step}: {why}", step=step, worker=worker)
