"""A version is what it was, byte for byte, when a trainer that ended before its commit comes to it once more."""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest

from actors.core.actor import handles
from actors.core.errors import ReplyError
from actors.protocol.steps import CommitStep, Committed
from actors.ranks.errors import RankLost
from actors.trainer.backend import TrainBackend
from actors.trainer.backends.fsdp.fsdp_backend import FsdpBackend
from actors.trainer.backends.torch.torch_backend import TorchBackend
from tests.actors.trainer.trainer_world import BookkeepingWeights, ScriptedScheduler, World, job_config
from tests.rank_processes import RankProcesses
from tests.tiny_checkpoint import make_tiny_checkpoint

STEPS = 3
LOST = 1
"""The step whose commit nobody hears: its version is published, and the checkpoint is that of the step before."""


WITHIN_S = 60.0


class Unheard(ReplyError):
    """What nobody hears any more."""


class DeafScheduler(ScriptedScheduler):
    """Does not hear the first commit of the step LOST."""

    def __init__(self) -> None:
        super().__init__(STEPS)
        self.checkpoint_after = {0}
        self.hears = asyncio.Event()

    @handles(CommitStep)
    async def commit(self, message: CommitStep) -> Committed:
        if message.step == LOST and not self.hears.is_set():
            async with asyncio.timeout(WITHIN_S):
                await self.hears.wait()
            raise Unheard("its trainer is gone")
        return await super().commit(message)


class Lives:
    """Makes the backend of one life after another, and ends what it has made."""

    def __init__(self, kind: str) -> None:
        self._ranks = [RankProcesses("fsdp", 2) for _ in range(2)] if kind == "fsdp" else []
        """Of both lives, since they are slow to start."""
        self._lives = 0

    def backend(self) -> TrainBackend:
        self._lives += 1
        return FsdpBackend(self._ranks[self._lives - 1].followers()) if self._ranks else TorchBackend()

    def kill_a_rank(self) -> None:
        if self._ranks:
            self._ranks[0].processes[0].send_signal(signal.SIGKILL)

    def close(self) -> None:
        for ranks in self._ranks:
            ranks.close()


async def until(condition: Callable[[], Any]) -> None:
    async with asyncio.timeout(WITHIN_S):
        while not condition():
            await asyncio.sleep(0.01)


@pytest.mark.timeout(120)
@pytest.mark.parametrize("kind", ["torch", "fsdp"])
async def test_a_version_that_was_published_before_a_kill_is_the_same_bytes_in_the_next_life(
    tmp_path: Path, kind: str
) -> None:
    """The trainer is killed, or one of its two ranks. The next weight server knows nothing: all is published again."""
    lives, scheduler = Lives(kind), DeafScheduler()
    trainer = {"backend": kind, "ranks": 2 if kind == "fsdp" else 1, "lr": 0.01, "micro_batch_tokens": 32, "threads": 1}
    world = World(tmp_path / "run", job=job_config(STEPS, trainer=trainer), scheduler=scheduler)
    world.model_path = str(make_tiny_checkpoint(tmp_path / "model"))
    try:
        world.backend = cast(Any, lives.backend())
        await world.start()
        await until(lambda: LOST + 1 in world.weights.published and len(scheduler.checkpoints) == 1)
        former = world.weights.manifests
        assert scheduler.commits.keys() == {*range(LOST)}
        lives.kill_a_rank()
        with contextlib.suppress(RankLost):
            await world.kill_trainer()
        scheduler.hears.set()
        await world.system.stop_actor("weights")
        world.weights = BookkeepingWeights()
        scheduler.services["weights"] = (await world.system.spawn("weights", world.weights)).address
        world.backend = cast(Any, lives.backend())
        await world.start_trainer()
        end = await world.finish(WITHIN_S)
        assert end.error is None
    finally:
        lives.close()
    again = world.weights.manifests
    assert former.keys() == {*range(LOST + 2)} and again.keys() == {*range(LOST, STEPS + 1)}
    both = sorted(former.keys() & again.keys())
    assert [again[version] for version in both] == [former[version] for version in both]
    assert len({manifest.chunk_hashes for manifest in (former | again).values()}) == STEPS + 1, "each is another one"
