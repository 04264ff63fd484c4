"""Dynamic sampling: the first groups with spread in prompt order, whoever is slow or dies, and no sample twice."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from actors.ledger import events as ev
from actors.ledger.ledger import Ledger
from actors.ledger.ledger_writer import LedgerWriter
from actors.ledger.memory_journal import MemoryJournal
from actors.protocol.rewards import Verdict
from actors.protocol.work import SamplingParams
from actors.scheduler.filtering import NO_SIGNAL
from tests.actors.scheduler_world import World, config, play_in

P, GROUP = 4, 4
FILTER = {"name": "grpo", "group_size": GROUP, "prompts_per_step": P, "filter": "spread"}


def has_spread(prompt: int) -> bool:
    return prompt % 3 == 1


def verdict(prompt: int, sibling: int) -> Verdict:
    return Verdict(prompt=prompt, sibling=sibling, reward=float(sibling % 2) if has_spread(prompt) else 1.0)


def expected(steps: int) -> dict[int, list[int]]:
    """Prompts of each step, worked out one after the other; a round asks for as many as the rate so far promises."""
    start, found = 0, {}
    for step in range(steps):
        end = start + P
        while (kept := sum(map(has_spread, range(start, end)))) < P:
            end += min(-(-(P - kept) * (end - start) // kept) if kept else P, P)
        found[step] = [p for p in range(start, end) if has_spread(p)][:P]
        start = end
    return found


async def begin(world: World, verdicts: Callable[[int, int], Verdict] = verdict, **source: Any) -> None:
    await world.start_head()
    world.rewards = await world.start_rewards(**source)
    world.rewards.verdict = verdicts
    world.workers = [await world.start_worker(f"rollout-{i}") for i in range(2)]
    world.trainer = await world.start_trainer()


def trained(world: World) -> dict[int, list[int]]:
    return {step: sorted({prompt for prompt, *_ in samples}) for step, samples in world.trained.items()}


def rows(world: World) -> list[dict[str, Any]]:
    return [event.fields for event in world.events if event.kind == "step"]


def job(steps: int = 3, **changes: Any) -> Any:
    return config(steps=steps, algorithm=FILTER | changes)


def test_a_step_keeps_the_first_groups_with_spread_and_the_next_begins_behind_it() -> None:
    async def scenario(world: World) -> None:
        await begin(world)
        assert await world.job.wait_over(600.0) == "finished"
        assert trained(world) == expected(3)
        assert all(len(samples) == P * GROUP for samples in world.trained.values())
        for row in rows(world):
            assert row["samples"] == P * GROUP
            assert row["samples_dropped"] == 0
            assert row["no_signal"] > 0
        result = world.job.result()
        assert result["no_signal"] == sum(row["no_signal"] for row in rows(world))
        assert result["prompts_lost"] == result["samples_trained_twice"] == 0
        assert not [event for event in world.events if event.kind == "trouble"]

    play_in(World, job(), scenario)


@pytest.mark.parametrize("seed", range(6))
def test_whoever_dies_when_and_in_whatever_order_groups_finish_the_same_are_kept(seed: int) -> None:
    """Workers of other speeds; one is killed, then the head, then the trainer, at moments that differ by seed."""

    async def scenario(world: World) -> None:
        await begin(world)
        for number, worker in enumerate(world.workers):
            worker.step_s = 0.004 + 0.013 * ((seed + number) % 3)
        await world.until(lambda: world.job.result()["steps"] >= 1 or seed % 2 == 1)
        await world.trainer.ctx.sleep(0.02 * (seed + 1))
        world.kill("rollout-0")
        await world.start_worker("rollout-2", step_s=0.007)
        await world.trainer.ctx.sleep(0.03 * seed)
        done = world.trainer.step
        for name in ("head", "rollout-1", "rollout-2", "trainer", "rewards"):
            world.kill(name)
        await world.start_head()
        (await world.start_rewards()).verdict = verdict
        await world.start_worker("rollout-3")
        newest = max((e.step for e in world.journal.read()[1] if isinstance(e, ev.Checkpointed)), default=0)
        await world.start_trainer(min(done, newest))
        assert await world.job.wait_over(600.0) == "finished"
        assert trained(world) == expected(4)

    world = play_in(World, job(4), scenario, seed)
    assert any(isinstance(event, ev.BatchExtended) for event in world.journal.read()[1])


def test_a_step_reads_no_more_than_its_bound_and_says_that_it_trains_fewer() -> None:
    async def scenario(world: World) -> None:
        await begin(world)
        assert await world.job.wait_over(600.0) == "finished"
        assert trained(world) == {0: [1, 4, 7], 1: [10, 13]}
        assert [row["no_signal"] for row in rows(world)] == [5, 6]
        told = [event.fields["message"] for event in world.events if event.kind == "trouble"]
        assert "step 0 trains 3 of 4 groups: of 8 prompts no more had rewards that differ" in told[0]

    play_in(World, job(2, filter_batches=2), scenario)


def test_of_more_groups_with_a_signal_than_a_step_needs_the_last_are_surplus_and_trained_by_no_step() -> None:
    """Prompt 0 has none, so two more are asked for, by the rate of 3 in 4, and both have one."""

    async def scenario(world: World) -> None:
        await begin(world, lambda p, s: Verdict(prompt=p, sibling=s, reward=float(p != 0 and s % 2)))
        assert await world.job.wait_over(600.0) == "finished"
        assert trained(world) == {0: [1, 2, 3, 4], 1: [6, 7, 8, 9]}
        found = [(row["no_signal"], row["surplus"], row["samples_dropped"]) for row in rows(world)]
        assert found == [(1, 1, 0), (0, 0, 0)]

    play_in(World, job(2), scenario)


def test_where_the_data_ends_the_last_step_trains_what_there_is() -> None:
    async def scenario(world: World) -> None:
        await begin(world, prompts=18)
        assert await world.job.wait_over(600.0) == "finished"
        steps = expected(9)
        found = trained(world)
        assert found[0] == steps[0]
        last = max(found)
        assert 0 < len(found[last]) < P and all(prompt < 18 for prompt in found[last])
        assert world.job.result()["state"] == "finished"

    play_in(World, job(9), scenario)


def test_a_step_without_any_spread_commits_nothing_and_the_next_goes_on_behind_it() -> None:
    async def scenario(world: World) -> None:
        flat = range(8)  # both batches of step 0
        await begin(world, lambda p, s: Verdict(prompt=p, sibling=s, reward=float(p not in flat and s % 2)))
        assert await world.job.wait_over(600.0) == "finished"
        assert trained(world) == {0: [], 1: [8, 9, 10, 11]}

    play_in(World, job(2, filter_batches=2), scenario)


def test_the_journal_of_a_filtered_job_folds_to_the_ledger_that_wrote_it() -> None:
    async def scenario(world: World) -> None:
        await begin(world)
        await world.until(lambda: world.trainer.step >= 2)
        again = Ledger()
        again.restore(world.journal.read()[1])
        ledger = world.scheduler._ledger
        assert again.next_prompt == ledger.next_prompt
        for step, batch in ledger.batches.items():
            assert again.batches[step].prompts.tolist() == batch.prompts.tolist()
            assert again.batches[step].state.tolist() == batch.state.tolist()

    play_in(World, job(), scenario)


def test_a_pruned_journal_still_says_behind_which_prompt_the_next_step_begins() -> None:
    """The last prompts of step 0 had no signal, and were trained by nobody: only a checkpoint's counters know them."""

    def prompts(first: int, count: int) -> dict[str, Any]:
        ones = np.ones(count, np.int32)
        names = np.arange(first, first + count)
        return {"prompts": names, "prompt_lengths": ones, "prompt_ids": ones, "contexts": [b""] * count}

    journal, ledger = MemoryJournal("j"), Ledger()
    ledger_writer = LedgerWriter(ledger, journal)
    ledger_writer.apply(ev.Opened(1))
    ledger_writer.apply(ev.BatchIssued(step=0, group_size=1, sampling=SamplingParams(max_tokens=4), **prompts(0, 2)))
    ledger_writer.apply(ev.BatchExtended(step=0, **prompts(2, 3)))
    ledger_writer.apply(ev.Dropped(0, np.arange(5, dtype=np.int32), NO_SIGNAL))
    ledger_writer.apply(ev.Committed(0, np.zeros(0, np.int64), np.zeros(0, np.int32), 1))
    known = {name: int(getattr(ledger.counters, name)) for name in ledger.counters.__dataclass_fields__}
    ledger_writer.apply(ev.Checkpointed(1, "step_000001", known))
    journal.prune(1)
    floor, events = journal.read()
    assert not any(isinstance(event, ev.BatchIssued | ev.BatchExtended) for event in events)
    again = Ledger(floor)
    again.restore(events)
    assert again.next_prompt == ledger.next_prompt == 5
