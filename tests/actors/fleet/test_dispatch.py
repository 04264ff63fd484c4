"""A round of hand-outs: messages to workers and one event of the ledger agree, whoever could not be told."""

from __future__ import annotations

import numpy as np
import pytest

from actors.core.message import Message
from actors.fleet.workers import WorkerTable
from actors.ledger import events as ev
from actors.ledger.ledger import Ledger
from actors.ledger.ledger_writer import LedgerWriter
from actors.ledger.memory_journal import MemoryJournal
from actors.protocol.work import Assign, SamplingParams
from actors.protocol.workers import RegisterWorker
from tests.actors.fleet.bare_scope import bare_scope, dispatcher
from transport.address import ActorAddress, PeerId
from transport.transport import SendOutcome

JOB, GROUP, SLOTS = "j", 2, 4


class Round:
    """Three workers of four places; those whose names are in ``deaf`` cannot be told anything."""

    def __init__(self, *, deaf: str, steps: int = 1, prompts: int = 6) -> None:
        self.deaf = deaf
        self.ledger, self.journal = Ledger(), MemoryJournal(JOB)
        self.ledger_writer, self.workers = LedgerWriter(self.ledger, self.journal), WorkerTable()
        self.ledger_writer.apply(ev.Opened(1))
        for name in ("a", "b", "c"):
            address = ActorAddress(name, PeerId(f"n.{name}", 1), f"memory://{name}")
            offer = RegisterWorker(job=JOB, worker=address, node="n", engine="simulated", slots=SLOTS, policy_version=0)
            self.workers.add(offer, 0.0)
        for step in range(steps):
            first = step * prompts
            self.ledger_writer.apply(
                ev.BatchIssued(
                    step=step, group_size=GROUP, sampling=SamplingParams(max_tokens=8),
                    prompts=np.arange(first, first + prompts), prompt_lengths=np.full(prompts, 1, np.int32),
                    prompt_ids=np.arange(prompts, dtype=np.int32), contexts=[b""] * prompts,
                )
            )  # fmt: skip
        self.told: dict[str, list[tuple[int, int, int]]] = {}
        """Worker → (assignment, prompt, sibling) of what it was told."""
        self.handed_out = dispatcher(bare_scope(self.ledger_writer, self.workers, self._tell)).assign(0.0)

    def _tell(self, worker: ActorAddress, message: Message) -> SendOutcome:
        assert isinstance(message, Assign)
        if worker.name in self.deaf:
            return SendOutcome.FULL
        told = self.told.setdefault(worker.name, [])
        told += [(s.assignment, work.prompt, s.sibling) for work in message.work for s in work.samples]
        return SendOutcome.QUEUED

    def held(self, worker: str) -> list[tuple[int, int, int]]:
        """The same, as the ledger has it."""
        found: list[tuple[int, int, int]] = []
        for number in self.ledger.in_flight(worker).tolist():
            ((step, rows),) = self.ledger.located(worker, np.array([number])).items()
            prompt = int(self.ledger.batches[step].prompts[rows[0] // GROUP])
            found.append((number, prompt, int(rows[0]) % GROUP))
        return found

    @property
    def assigned(self) -> list[ev.Assigned]:
        return [event for event in self.journal.read()[1] if isinstance(event, ev.Assigned)]


@pytest.mark.parametrize("deaf", ["a", "b", "c"])
@pytest.mark.parametrize("steps", [1, 2])
def test_what_workers_are_told_is_what_the_ledger_has_them_hold_though_one_could_not_be_told(
    deaf: str, steps: int
) -> None:
    one = Round(deaf=deaf, steps=steps, prompts=6 // steps)
    others = [name for name in "abc" if name != deaf]
    assert sorted(one.told) == others
    for name in others:
        assert one.held(name) == sorted(one.told[name])
        assert one.workers.by_name[name].in_flight == len(one.told[name]) == SLOTS
    assert one.held(deaf) == []
    assert one.workers.by_name[deaf].in_flight == 0
    assert one.handed_out == 2 * SLOTS


def test_a_round_is_one_event_a_step() -> None:
    one = Round(deaf="", steps=2, prompts=3)
    assert [event.step for event in one.assigned] == [0, 1]
    assert sum(len(event.rows) for event in one.assigned) == one.handed_out == 12


def test_where_nobody_could_be_told_nothing_is_written() -> None:
    one = Round(deaf="abc")
    assert one.handed_out == 0
    assert one.assigned == []
    assert one.ledger.batches[0].generating
