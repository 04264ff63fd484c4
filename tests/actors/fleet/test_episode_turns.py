"""Turns of episodes as workers get them: the present context, where it stands in its row, and who may go on."""

from __future__ import annotations

import numpy as np

from actors.core.message import Message
from actors.fleet.workers import WorkerTable
from actors.ledger.ledger import Ledger
from actors.ledger.ledger_writer import LedgerWriter
from actors.ledger.memory_journal import MemoryJournal
from actors.protocol.work import Assign, PromptWork
from actors.protocol.workers import RegisterWorker
from tests.actors.fleet.bare_scope import bare_scope, dispatcher
from tests.actors.ledger import episode_events as ee
from transport.address import ActorAddress, PeerId
from transport.transport import SendOutcome


def handed_out(ledger: Ledger, versions: dict[str, int]) -> dict[str, list[PromptWork]]:
    """What the workers, each with the version that it serves, are told in one round."""
    workers, told = WorkerTable(), dict[str, list[PromptWork]]()
    for name, version in versions.items():
        address = ActorAddress(name, PeerId(f"n.{name}", 1), f"memory://{name}")
        offer = RegisterWorker(job="j", worker=address, node="n", engine="simulated", slots=4, policy_version=version)
        workers.add(offer, 0.0)

    def tell(worker: ActorAddress, message: Message) -> SendOutcome:
        assert isinstance(message, Assign)
        told.setdefault(worker.name, []).extend(message.work)
        return SendOutcome.QUEUED

    dispatcher(bare_scope(LedgerWriter(ledger, MemoryJournal("j")), workers, tell)).assign(0.0)
    return told


def text(ids: np.ndarray) -> str:
    return "".join(map(chr, ids.tolist()))


def test_a_turn_is_handed_out_in_its_present_context_and_says_where_that_stands_in_the_row() -> None:
    ledger = ee.episodes()
    ee.turned(ledger, 0, "old", fresh=True)
    ee.say(ledger, 0, "a!")
    ee.turned(ledger, 0, "new", fresh=True)
    ee.say(ledger, 0, "b!")
    ee.turned(ledger, 0, "more")
    [[work]] = handed_out(ledger, {"w": 0}).values()
    [sample] = work.samples
    assert (text(work.prompt_ids), text(sample.generated)) == ("new", "b!more")
    assert (sample.first, sample.limit, work.prompt, sample.sibling) == (8, 18, 0, 0)


def test_a_first_turn_has_all_that_was_said_as_its_prompt_and_each_episode_a_prompt_of_its_own() -> None:
    ledger = ee.episodes()
    for row in range(3):
        ee.turned(ledger, row, f"task {row}", fresh=True)
    [told] = handed_out(ledger, {"w": 0}).values()
    assert [(text(work.prompt_ids), work.prompt, work.samples[0].sibling) for work in told] == [
        ("task 0", 0, 0), ("task 1", 0, 1), ("task 2", 1, 0),
    ]  # fmt: skip
    assert all(len(work.samples[0].generated) == 0 and work.samples[0].first == 6 for work in told)


def test_a_turn_goes_on_with_no_older_version_than_the_turns_before_it() -> None:
    ledger = ee.episodes()
    ee.turned(ledger, 0, "x", fresh=True)
    ee.say(ledger, 0, "a!", version=1)
    ee.turned(ledger, 0, "y")
    assert handed_out(ledger, {"old": 0}) == {}
    assert list(handed_out(ledger, {"old": 0, "new": 1})) == ["new"]


def test_what_waits_for_its_environment_is_handed_out_to_nobody() -> None:
    ledger = ee.episodes()
    assert handed_out(ledger, {"w": 0}) == {}


def between_two_turns(ledger: Ledger, rows: int) -> None:
    """Worker b has said the first turn of each of so many episodes, and their environments have answered."""
    for row in range(rows):
        ee.turned(ledger, row, "x", fresh=True)
        ee.say(ledger, row, "a!", worker="b")
        ee.turned(ledger, row, "y")


def test_a_turn_goes_to_the_worker_that_had_the_one_before_it_and_has_its_context() -> None:
    ledger = ee.episodes()
    between_two_turns(ledger, 1)
    assert list(handed_out(ledger, {"a": 0, "b": 0, "c": 0})) == ["b"]


def test_a_worker_that_is_much_fuller_than_others_gets_no_more_turns_though_it_had_those_before() -> None:
    ledger = ee.episodes()
    between_two_turns(ledger, 4)
    told = handed_out(ledger, {"a": 0, "b": 0})
    assert {name: len(work) for name, work in told.items()} == {"a": 1, "b": 3}, "one of four places more at the most"


def test_a_turn_whose_last_worker_is_gone_goes_to_another() -> None:
    ledger = ee.episodes()
    between_two_turns(ledger, 1)
    assert list(handed_out(ledger, {"a": 0})) == ["a"]
