"""The simulated disk keeps what the real one keeps, and loses what the real one may lose."""

from __future__ import annotations

import asyncio
import random

import pytest

from actors.ledger import events as ev
from actors.ledger.errors import JournalFailed
from configs.limits import DEFAULT_LIMITS
from supervisors.simulation.cluster.journal import JournalFile, SimulatedJournal
from tests.simulated import run_simulated
from transport.sim.loop import SimulatedLoop
from transport.sim.process import SimProcess

FLUSH_S = DEFAULT_LIMITS.journal_flush_s


def opened(term: int) -> ev.Opened:
    return ev.Opened(term)


def journal() -> tuple[JournalFile, SimulatedJournal]:
    file = JournalFile("j", lambda kind, body: None)
    return file, SimulatedJournal(file, DEFAULT_LIMITS, disk_s=0.01)


def read(file: JournalFile) -> list[int]:
    return [event.term for event in file.read()[1] if isinstance(event, ev.Opened)]


def test_what_is_appended_is_written_by_the_group_and_read_by_the_next_life() -> None:
    async def main() -> None:
        file, first = journal()
        first.append(opened(1))
        first.append(opened(2))
        assert read(file) == []
        await asyncio.sleep(2 * FLUSH_S)
        assert read(file) == [1, 2]
        second = SimulatedJournal(file, DEFAULT_LIMITS, disk_s=0.01)
        second.append(opened(3))
        await second.durable()
        assert read(file) == [1, 2, 3]

    run_simulated(main())


def test_the_death_of_the_process_loses_what_had_not_been_written() -> None:
    loop = SimulatedLoop()

    async def main() -> None:
        file, ours = journal()
        process = SimProcess("head")

        async def write() -> None:
            ours.append(opened(1))
            await ours.durable()
            ours.append(opened(2))

        await process.start(write(), "write")
        loop.kill(process)
        await asyncio.sleep(10 * FLUSH_S)
        assert read(file) == [1]

    try:
        loop.run_until_complete(main())
    finally:
        loop.dismantle()


def test_the_loss_of_power_leaves_a_prefix_with_all_that_was_durable() -> None:
    async def main() -> None:
        lengths = set[int]()
        for seed in range(40):
            file, ours = journal()
            for term in range(1, 4):
                ours.append(opened(term))
            await ours.durable()
            for term in range(4, 8):
                ours.append(opened(term))
            await asyncio.sleep(2 * FLUSH_S)
            lost = file.lose_power(random.Random(seed))
            left = read(file)
            assert left == list(range(1, len(left) + 1))
            assert (len(left) >= 3, len(left) + lost, len(file.history)) == (True, 7, len(left))
            lengths.add(len(left))
        assert lengths == {3, 4, 5, 6, 7}

    run_simulated(main())


def test_a_full_disk_fails_this_life_for_good_and_the_next_one_when_there_is_room() -> None:
    async def main() -> None:
        file, ours = journal()
        ours.append(opened(1))
        await ours.durable()
        file.full = True
        ours.append(opened(2))
        with pytest.raises(JournalFailed, match="full"):
            await ours.durable()
        with pytest.raises(JournalFailed, match="full"):
            file.read()
        file.full = False
        with pytest.raises(JournalFailed):
            ours.append(opened(3))
        assert read(file) == [1]

    run_simulated(main())


def test_pruning_keeps_what_says_what_was_trained() -> None:
    async def main() -> None:
        file, ours = journal()
        ours.append(opened(1))
        ours.append(ev.Rewound(0))
        ours.prune(5)
        await ours.durable()
        assert (file.read()[0], [ev.kind_of(event) for event in file.read()[1]]) == (5, ["opened", "rewound"])

    run_simulated(main())
