"""Killed at any turn of its loop, and opened again, the service answers as if nothing had happened.

The fakes fold every call into their state, so that an operation which is lost, doubled or moved shows in each later
answer. The client keeps all requests in flight, out of order, and repeats whatever was not answered. What is drawn by
seeds, with several tenants, is in ``test_simulated_tenants.py``.
"""

from __future__ import annotations

import asyncio
import random
import tempfile
from pathlib import Path

import numpy as np
import pytest

from actors.tinker import operations as op
from actors.tinker.sampling import SamplingParameters
from actors.tinker.service import TinkerService
from tests.actors.tinker.tinker_world import FEW, World, call, simulated, step, value

STEPS = 4
LIMITS = FEW.model_copy(update={"tinker_replay_operations": 3})


def operations() -> dict[int, op.Operation]:
    found: list[op.Operation] = []
    for number in range(STEPS):
        found += [call(number, 1), call(number, 2, 3), step(1e-3 * (number + 1))]
    found += [op.Save("end"), op.Export(name="end"), call(5, forward_only=True), op.Refused("no"), call(6), step()]
    return dict(enumerate(found, 1))


async def story(world: World, rng: random.Random) -> str:
    """All that the client is answered, as text."""
    session = await world.session()
    model = await world.model(session)
    asked = operations()
    order = sorted(asked, key=lambda seq: seq + rng.random() * 4)

    async def one(seq: int, after: float) -> op.Answer:
        await asyncio.sleep(after)
        request = await world.submit(model, seq, asked[seq])
        if rng.random() < 0.2:  # the answer to the request was lost on its way
            assert await world.submit(model, seq, asked[seq]) == request
        return await world.answer(request)

    answers = await asyncio.gather(*(one(seq, place * 1e-3) for place, seq in enumerate(order)))
    by_number = dict(zip(order, answers, strict=True))
    path = value(by_number[3 * STEPS + 2])["path"]
    sampler = await world.ask(lambda service: service.create_sampler("alice", session, 0, path=path, base_model=None))
    parameters = SamplingParameters(max_tokens=4, seed=3)
    sample = op.encode(
        op.Sample(op.Array.of(np.arange(4, dtype=np.int32)), 2, parameters, prompt_logprobs=True, topk=2)
    )
    requests = await asyncio.gather(
        *(
            world.ask(lambda service, seq=seq: service.sample(service.sampler("alice", sampler), seq, sample))
            for seq in range(3)
        )
    )
    samples = [await world.answer(request) for request in requests]
    told = repr(([by_number[seq] for seq in sorted(by_number)], samples))
    return told.replace(session, "SESSION")  # a session whose answer was lost is begun anew


def told(directory: Path, *, kills: tuple[int, ...] = ()) -> tuple[str, int]:
    """What the client was answered, and the number of turns; the service is killed after each number of ``kills``."""

    async def all_of_it() -> str:
        world = World(loop, directory, LIMITS)
        loop.strike, loop.strikes = world.strike, frozenset(kills)
        first_life = asyncio.create_task(world.begin())
        async with asyncio.timeout(10_000.0):
            answers = await story(world, random.Random(0))
        first_life.cancel()
        world.kill()
        return answers

    with simulated() as loop:
        return loop.run_until_complete(all_of_it()), loop.turns


def fresh(directory: Path) -> Path:
    return Path(tempfile.mkdtemp(dir=directory))


def test_a_kill_at_any_seventh_turn_changes_no_answer(tmp_path):
    undisturbed, turns = told(fresh(tmp_path))
    for turn in range(3, turns, max(7, turns // 40)):
        assert told(fresh(tmp_path), kills=(turn,))[0] == undisturbed, f"killed after {turn} turns"


@pytest.mark.long
def test_a_kill_at_any_turn_changes_no_answer(tmp_path):
    undisturbed, turns = told(fresh(tmp_path))
    for turn in range(turns):
        assert told(fresh(tmp_path), kills=(turn,))[0] == undisturbed, f"killed after {turn} turns"


def test_a_service_that_is_closed_goes_on_in_its_next_life(tmp_path):
    """An orderly end loses no more than a kill does."""

    async def closed() -> str:
        world = World(loop, tmp_path, LIMITS)
        await world.begin()
        client = asyncio.create_task(story(world, random.Random(0)))
        await asyncio.sleep(3e-3)
        world.ready.clear()
        await closing(world.service)
        await world.begin()
        return await client

    async def closing(service: TinkerService) -> None:
        await service.close()

    undisturbed, _ = told(fresh(tmp_path))
    with simulated() as loop:
        assert loop.run_until_complete(closed()) == undisturbed
