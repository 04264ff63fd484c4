"""Killed at any turn of its loop, and opened again, the service answers as if nothing had happened.

The fakes fold every call into their state, so that an operation which is lost, doubled or moved shows in each later
answer. The client keeps all requests in flight, out of order, and repeats whatever was not answered.
"""

from __future__ import annotations

import asyncio
import random
import sqlite3
import tempfile
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from unittest.mock import patch

import numpy as np
import pytest

from actors.tinker import operations as op
from actors.tinker.errors import Problem
from actors.tinker.model_line import ModelLine
from actors.tinker.operation_log import OperationLog, Outcome
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


def told(
    directory: Path, *, seed: int = 0, kills: tuple[int, ...] = (), lost: frozenset[int] = frozenset()
) -> tuple[str, int]:
    """What the client was answered, and the number of turns; the service is killed after each number of ``kills``."""

    async def all_of_it() -> str:
        world = World(loop, directory, LIMITS)
        world.faults.lost_at = set(lost)
        loop.strike, loop.strikes = world.strike, frozenset(kills)
        first_life = asyncio.create_task(world.begin())
        async with asyncio.timeout(10_000.0):
            answers = await story(world, random.Random(seed))
        first_life.cancel()
        world.kill()
        return answers

    with simulated(seed) as loop:
        return loop.run_until_complete(all_of_it()), loop.turns


def fresh(directory: Path) -> Path:
    return Path(tempfile.mkdtemp(dir=directory))


def drawn(seed: int, turns: int) -> tuple[tuple[int, ...], frozenset[int]]:
    """When the service is killed, and which calls the learner dies in."""
    rng = random.Random(f"faults {seed}")
    kills = sorted(rng.randrange(turns) for _ in range(rng.randint(1, 3)))
    return tuple(kills), frozenset(rng.randrange(1, 40) for _ in range(rng.randint(0, 2)))


def test_a_kill_at_any_seventh_turn_changes_no_answer(tmp_path):
    undisturbed, turns = told(fresh(tmp_path))
    for turn in range(3, turns, max(7, turns // 40)):
        assert told(fresh(tmp_path), kills=(turn,))[0] == undisturbed, f"killed after {turn} turns"


@pytest.mark.long
def test_a_kill_at_any_turn_changes_no_answer(tmp_path):
    undisturbed, turns = told(fresh(tmp_path))
    for turn in range(turns):
        assert told(fresh(tmp_path), kills=(turn,))[0] == undisturbed, f"killed after {turn} turns"


def differs(directory: Path, seed: int, undisturbed: str, turns: int) -> bool:
    kills, lost = drawn(seed, turns)
    try:
        return told(fresh(directory), seed=seed, kills=kills, lost=lost)[0] != undisturbed
    except (Problem, TimeoutError, AssertionError, sqlite3.Error):
        return True


@pytest.mark.parametrize("seeds", [20, pytest.param(1000, marks=pytest.mark.long)])
def test_kills_and_lost_learners_change_no_answer(tmp_path, seeds):
    undisturbed, turns = told(fresh(tmp_path))
    assert [seed for seed in range(seeds) if differs(tmp_path, seed, undisturbed, turns)] == []


# ------------------------------------------------------------ bugs that must be found


def _forgotten(original: Callable[..., object]) -> Callable[..., object]:
    """Bodies are dropped at their answer: a death loses what came after the saved state."""

    async def commit(self: OperationLog, model: str, seq: int, outcome: Outcome) -> None:
        await original(
            self, model, seq, Outcome(outcome.answer, False, outcome.weights, outcome.sampler, outcome.state)
        )  # type: ignore[misc]

    return commit


def _named_first(original: Callable[..., object]) -> Callable[..., object]:
    """The saved state is named in a transaction before that of its operation: a death between both doubles it."""

    async def commit(self: OperationLog, model: str, seq: int, outcome: Outcome) -> None:
        if outcome.state is not None:
            await self._run(lambda db: db.execute("UPDATE models SET state = ? WHERE id = ?", (outcome.state, model)))
        await original(self, model, seq, outcome)  # type: ignore[misc]

    return commit


def _not_awaited(original: Callable[..., object]) -> Callable[..., object]:
    """A request is acknowledged before it is on the disk."""

    async def submit(self: ModelLine, seq: int, body: bytes) -> None:
        asyncio.create_task(original(self, seq, body))  # type: ignore[arg-type]  # noqa: RUF006

    return submit


def _kept_learner(original: Callable[..., object]) -> Callable[..., object]:
    """The learner of a call that was lost goes on, with whatever it had done by then."""

    async def drop(self: ModelLine) -> None:
        return None

    return drop


BUGS: dict[str, tuple[type, str, Callable[..., Callable[..., object]]]] = {
    "bodies are deleted too early": (OperationLog, "commit", _forgotten),
    "a state is named before its operation": (OperationLog, "commit", _named_first),
    "a request is acknowledged before it is stored": (ModelLine, "submit", _not_awaited),
    "a lost learner goes on": (ModelLine, "_drop", _kept_learner),
}


@pytest.mark.parametrize("bug", BUGS)
def test_a_planted_bug_is_found(tmp_path, bug):
    undisturbed, turns = told(fresh(tmp_path))
    owner, name, wrong = BUGS[bug]
    with ExitStack() as planted:
        planted.enter_context(patch.object(owner, name, wrong(getattr(owner, name))))
        assert any(differs(tmp_path, seed, undisturbed, turns) for seed in range(200)), "none of 200 seeds has found it"


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
