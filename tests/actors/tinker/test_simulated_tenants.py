"""Thousands of seeds: several tenants' programs at once, struck by faults of all kinds, are told what each is alone.

By a seed are drawn: what is asked, and in which order it arrives; answers that are lost and requests that come again;
deaths of the server at any turn of its loop, and of learners; saves that end halfway; a disk that is slow, or refuses;
models that go to rest; sessions that end in the middle.
"""

from __future__ import annotations

import asyncio
import itertools
import random
import tempfile
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from actors.tinker import operations as op
from actors.tinker.directories import Directories
from actors.tinker.errors import LogFailed
from actors.tinker.log_writer import LogWriter
from actors.tinker.model_line import ModelLine
from actors.tinker.operation_log import OperationLog, Outcome
from tests.actors.tinker.tenant_programs import PATIENCE_S, Client, drawn, expected
from tests.actors.tinker.tinker_world import FEW, World, simulated

LIMITS = FEW.model_copy(update={"tinker_replay_operations": 3, "tinker_attempts": 9, "tinker_poll_s": 25.0})
TURNS, TRANSACTIONS = 2500, 350
"""Turns of the loop, and changes of the log, among which kills are drawn: a story has about as many."""


def differences(directory: Path, seed: int) -> list[str]:
    """What the tenants were told in the world of a seed, and should not have been."""
    rng, worlds = random.Random(f"world {seed}"), list[World]()
    directory = Path(tempfile.mkdtemp(dir=directory))

    async def told() -> list[str]:
        world = World(loop, directory, LIMITS)
        worlds.append(world)
        strike(world, rng)
        loop.strike, loop.strikes = world.strike, frozenset(rng.randrange(TURNS) for _ in range(rng.randrange(3)))
        first_life = asyncio.create_task(world.begin())
        programs = [drawn(rng, tenant, ends=tenant == "carol") for tenant in ("alice", "bob", "bob", "carol")]
        clients = [Client(world, program, random.Random(rng.random())) for program in programs]
        async with asyncio.timeout(PATIENCE_S):
            await asyncio.gather(*(client.play() for client in clients))
        first_life.cancel()
        loop.strikes = frozenset()
        world.kill()
        return [line for client in clients for line in await wrong(client, directory)]

    with simulated(seed) as loop, patch.object(LogWriter, "run", disk(rng, LogWriter.run, lambda: worlds[0].strike())):
        try:
            return loop.run_until_complete(told())
        except Exception as error:
            return [repr(error)]


async def wrong(client: Client, directory: Path) -> list[str]:
    """What a client was told that it is not told alone."""
    if client.program.ends:
        return []
    right = await expected(client.program, directory)
    keys = sorted(client.told.keys() | right.keys(), key=repr)
    different = [key for key in keys if client.told.get(key) != right.get(key)]
    return client.early + [
        f"{client.program.tenant}, {key}: {client.told.get(key)}, expected {right.get(key)}" for key in different
    ]


def strike(world: World, rng: random.Random) -> None:
    """Draw what the fakes and the way to the client do wrong."""
    world.faults.lost_at = {rng.randrange(1, 120) for _ in range(rng.randrange(4))}
    world.faults.torn_at = {rng.randrange(1, 20) for _ in range(rng.randrange(3))}
    losses, often = random.Random(rng.random()), rng.choice([0.0, 0.1, 0.3])
    world.is_lost = lambda: losses.random() < often


def disk(
    rng: random.Random, original: Callable[..., Awaitable[Any]], strike: Callable[[], None]
) -> Callable[..., Awaitable[Any]]:
    """A disk that takes its time for each change, one by one, and may refuse one; after some ``strike`` comes."""
    draw, slow_s = random.Random(rng.random()), rng.choice([0.0, 0.0, 1e-3, 0.02])
    refused = rng.randrange(4 * TRANSACTIONS)
    deadly = {rng.randrange(TRANSACTIONS) for _ in range(rng.randrange(6))}
    numbers = itertools.count()

    async def run(self: LogWriter, change: Callable[..., Any]) -> Any:
        async with self.__dict__.setdefault("turn", asyncio.Lock()):
            await asyncio.sleep(slow_s * draw.random())
            number = next(numbers)
            if number == refused:
                self.failure = LogFailed("the disk was told to be full")
            result = await original(self, change)
            if number in deadly:
                strike()  # what was changed is on the disk, and nobody has been told
            await asyncio.sleep(slow_s * draw.random())
            return result

    return run


MANY = pytest.param(range(30, 1000), marks=[pytest.mark.long, pytest.mark.timeout(900)])


@pytest.mark.parametrize("seeds", [range(30), MANY], ids=["few", "many"])
def test_whatever_goes_wrong_each_tenant_is_told_what_it_is_told_alone(tmp_path, seeds):
    assert {seed: found for seed in seeds if (found := differences(tmp_path, seed))} == {}


# ------------------------------------------------------------ bugs that must be found

Original = Callable[..., Any]


def _bodies_deleted_early(original: Original) -> Original:
    """Bodies are dropped at their answer: a death loses what came after the saved state."""

    async def commit(self: OperationLog, model: str, seq: int, outcome: Outcome) -> None:
        await original(
            self, model, seq, Outcome(outcome.answer, False, outcome.weights, outcome.sampler, outcome.state)
        )

    return commit


def _state_named_early(original: Original) -> Original:
    """The saved state is named in a transaction before that of its operation: a death between both doubles it."""

    async def commit(self: OperationLog, model: str, seq: int, outcome: Outcome) -> None:
        if outcome.state is not None:
            await self._run(lambda db: db.execute("UPDATE models SET state = ? WHERE id = ?", (outcome.state, model)))
        await original(self, model, seq, outcome)

    return commit


def _answered_before_the_state(original: Original) -> Original:
    """An answer is committed, and the state that it names is written after it."""

    async def written(self: ModelLine, what: Any, seq: int, write: Any) -> str:
        if what != "state":
            return await original(self, what, seq, write)
        name = await self.parts.directories.fresh(self.row.number, what, seq)
        asyncio.create_task(write(self.parts.directories.path(name)))  # noqa: RUF006
        return name

    return written


def _stored_late(original: Original) -> Original:
    """A request is acknowledged before it is on the disk."""

    async def submit(self: ModelLine, seq: int, body: bytes) -> None:
        asyncio.create_task(original(self, seq, body))  # noqa: RUF006

    return submit


def _repeats_executed(original: Original) -> Original:
    """A request that comes again after its answer is computed again."""

    async def submit(self: ModelLine, seq: int, body: bytes) -> None:
        operation = op.read_operation(body)
        if seq < self.next and self._learner is not None and isinstance(operation, op.ForwardBackward | op.OptimStep):
            await self._compute(self._learner, operation)
        await original(self, seq, body)

    return submit


def _lost_learner_kept(original: Original) -> Original:
    """The learner of a call that was lost goes on, with whatever it had done by then."""

    async def drop(self: ModelLine) -> None:
        return None

    return drop


def _refused_step_forgotten(original: Original) -> Original:
    """A refused step is not executed again after a death, and the gradient that it forgot is there again."""

    async def commit(self: OperationLog, model: str, seq: int, outcome: Outcome) -> None:
        replays = outcome.replays and not isinstance(outcome.answer, op.Failed)
        await original(
            self, model, seq, Outcome(outcome.answer, replays, outcome.weights, outcome.sampler, outcome.state)
        )

    return commit


def _replayed_as_they_came(original: Original) -> Original:
    """After a death operations are executed in the order in which they arrived."""

    async def to_replay(self: OperationLog, model: str) -> list[int]:
        numbers = await original(self, model)
        rows = "SELECT seq FROM operations WHERE line = ? ORDER BY rowid"
        stored = await self._run(lambda db: db.execute(rows, (model,)).fetchall())
        return [seq for (seq,) in stored if seq in numbers]

    return to_replay


def _one_snapshot(original: Original) -> Original:
    """All snapshots of a model lie in one directory: later steps change those that were made before."""

    async def fresh(self: Directories, model: int, what: Any, seq: int) -> str:
        return await original(self, model, what, 0 if what == "sampler" else seq)

    return fresh


BUGS: dict[str, tuple[type, str, Callable[[Original], Original]]] = {
    "bodies are deleted too early": (OperationLog, "commit", _bodies_deleted_early),
    "a state is named before its operation": (OperationLog, "commit", _state_named_early),
    "an answer is committed before the state": (ModelLine, "_written", _answered_before_the_state),
    "a request is acknowledged before it is stored": (ModelLine, "submit", _stored_late),
    "a repeat is executed again": (ModelLine, "submit", _repeats_executed),
    "a lost learner goes on": (ModelLine, "_drop", _lost_learner_kept),
    "a refused step is forgotten": (OperationLog, "commit", _refused_step_forgotten),
    "operations are replayed as they came": (OperationLog, "to_replay", _replayed_as_they_came),
    "a snapshot changes": (Directories, "fresh", _one_snapshot),
}


@pytest.mark.parametrize("bug", BUGS)
def test_a_planted_bug_is_found(tmp_path, bug):
    owner, name, planted = BUGS[bug]
    with patch.object(owner, name, planted(getattr(owner, name))):
        assert any(differences(tmp_path, seed) for seed in range(30)), "none of the first 30 seeds has found it"
